//! Turns: what is said, thought and called is found, however the text is cut; a naive twin finds the same.

mod support;

use std::fmt::Write as _;
use std::sync::Arc;

use output::{ReasoningFormat, Tool, TurnEvent, TurnFormat, TurnParser};
use proptest::prelude::*;
use serde_json::{Value, json};

use support::turns::{Turn, read, read_in_all_cuts};

fn tools() -> Arc<[Tool]> {
    let parameters = json!({"type": "object", "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array"},
        "deep": {"type": ["object", "null"]},
    }});
    let Value::Object(parameters) = parameters else { panic!("an object") };
    Arc::new([Tool { name: "weather".to_owned(), parameters, strict: false }])
}

fn parser(format: &str, reasoning: Option<&str>) -> TurnParser {
    let format = TurnFormat::named(format).expect("a format");
    let reasoning = reasoning.map(|name| ReasoningFormat::named(name).expect("a format"));
    TurnParser::new(Some(format), reasoning, tools(), false)
}

/// The turn of a text, however it is cut.
fn turn_of(format: &str, text: &str) -> Turn {
    read_in_all_cuts(&parser(format, Some("qwen3")), text)
}

fn called(content: &str, calls: &[(&str, &str)]) -> Turn {
    let calls =
        calls.iter().map(|(name, arguments)| ((*name).to_owned(), (*arguments).to_owned(), true)).collect();
    Turn { content: content.to_owned(), reasoning: String::new(), calls }
}

#[test]
fn each_format_is_read() {
    let paris = r#"{"city": "Paris"}"#;
    for (format, text, expected) in [
        (
            "hermes",
            "Sure. \n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>\n\
             <tool_call>{\"arguments\": {}, \"name\": \"g\"}</tool_call> Done.",
            called("Sure.Done.", &[("weather", paris), ("g", "{}")]),
        ),
        (
            "hermes",
            r#"<tool_call>{"name": "f", "arguments": "{\"a\": 1}", "id": [1]}</tool_call>"#,
            called("", &[("f", r#"{"a": 1}"#)]),
        ),
        ("hermes", r#"<tool_call>{"name": "f"}</tool_call>"#, called("", &[("f", "{}")])),
        (
            "llama3_json",
            r#" {"name": "weather", "parameters": {"city": "Paris"}}; {"name": "g", "parameters": {}}"#,
            called("", &[("weather", paris), ("g", "{}")]),
        ),
        (
            "llama3_json",
            r#"Look: <|python_tag|>{"name": "g", "parameters": {"a": [1, {}]}}"#,
            called("Look:", &[("g", r#"{"a": [1, {}]}"#)]),
        ),
        (
            "mistral",
            r#"[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "g"}]"#,
            called("", &[("weather", paris), ("g", "{}")]),
        ),
        (
            "mistral",
            r#"[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]g{}"#,
            called("", &[("weather", paris), ("g", "{}")]),
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=weather>\n<parameter=city>\nNew\n\"York\"</parameter>\n<parameter=days>\n3\n\
             </parameter>\n<parameter=deep>\n{\"a\": [True]}\n</parameter>\n</function>\n</tool_call>",
            called("", &[("weather", r#"{"city": "New\n\"York\"", "days": 3, "deep": "{\"a\": [True]}"}"#)]),
        ),
        (
            "qwen3_coder",
            "<tool_call><function=g></function></tool_call>\n<tool_call><function=weather><parameter=days>many\
             </parameter><parameter=deep>None</parameter></function></tool_call>",
            called("", &[("g", "{}"), ("weather", r#"{"days": "many", "deep": null}"#)]),
        ),
        (
            "pythonic",
            "[weather(city='Pa\\'ris', tags=[1, (True, None)]), a.b()]",
            called("", &[("weather", r#"{"city": "Pa'ris", "tags": [1, [true, null]]}"#), ("a.b", "{}")]),
        ),
        (
            "deepseek_v31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"Paris\"}<｜tool▁call▁end｜>\
             <｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            called("", &[("weather", paris), ("g", "{}")]),
        ),
    ] {
        assert_eq!(turn_of(format, text), expected, "{format}: {text}");
    }
}

#[test]
fn each_format_with_marks_of_its_own_is_read() {
    let paris = r#"{"city": "Paris"}"#;
    for (format, text, expected) in [
        (
            "deepseek_v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"city\": \"Paris\"}\n```\
             <｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜>\
             <｜tool▁calls▁end｜>",
            called("", &[("weather", paris), ("g", "{}")]),
        ),
        (
            "glm45",
            "Sure.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>\nParis</arg_value>\n<arg_key>days</arg_key>\n\
             <arg_value>3</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>",
            called("Sure.", &[("weather", r#"{"city": "\nParis", "days": 3}"#), ("g", "{}")]),
        ),
        (
            "glm47",
            "<tool_call>weather<arg_key>deep</arg_key><arg_value>null</arg_value></tool_call><tool_call>g</tool_call>",
            called("", &[("weather", r#"{"deep": null}"#), ("g", "{}")]),
        ),
        (
            "minimax_m2",
            "<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">Paris</parameter>\n</invoke>\n\
             <invoke name=\"g\">\n</invoke>\n</minimax:tool_call> Done.",
            called("Done.", &[("weather", paris), ("g", "{}")]),
        ),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>\
             {\"city\": \"Paris\"}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}\
             <|tool_call_end|><|tool_calls_section_end|>",
            called("", &[("weather", paris), ("g", "{}")]),
        ),
        (
            "lfm2",
            "<|tool_call_start|>[weather(city='Paris'), g()]<|tool_call_end|>Done.",
            called("Done.", &[("weather", paris), ("g", "{}")]),
        ),
        (
            "seed_oss",
            "Now.<seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n</function>\n\
             </seed:tool_call>\n<seed:tool_call>\n<function=g>\n</function>\n</seed:tool_call>",
            called("Now.", &[("weather", paris), ("g", "{}")]),
        ),
        ("llama4_pythonic", "[weather(city='Paris'), g()]", called("", &[("weather", paris), ("g", "{}")])),
        (
            "llama4_pythonic",
            "See: <|python_start|>[weather(city='Paris')]<|python_end|>Done.",
            called("See:Done.", &[("weather", paris)]),
        ),
        (
            "internlm",
            "<|action_start|> <|plugin|>\n{\"name\": \"weather\", \"parameters\": {\"city\": \"Paris\"}}<|action_end|>",
            called("", &[("weather", paris)]),
        ),
        (
            "granite",
            r#"<|tool_call|> [{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "g", "arguments": {}}]"#,
            called("", &[("weather", paris), ("g", "{}")]),
        ),
        (
            "jamba",
            "<tool_calls>[\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}\n]</tool_calls>",
            called("", &[("weather", paris)]),
        ),
        (
            "phi4_mini_json",
            r#"functools[{"name": "weather", "arguments": {"city": "Paris"}}]"#,
            called("", &[("weather", paris)]),
        ),
    ] {
        assert_eq!(turn_of(format, text), expected, "{format}: {text}");
    }
}

#[test]
fn formats_with_flags_quotes_lines_and_channels_are_read() {
    let paris = r#"{"city": "Paris"}"#;
    for (format, text, expected) in [
        (
            "deepseek_v32",
            "Sure.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"weather\">\n\
             <｜DSML｜parameter name=\"city\" string=\"true\">12</｜DSML｜parameter>\n\
             <｜DSML｜parameter name=\"more\" string=\"false\">{\"a\": [1]}</｜DSML｜parameter>\n</｜DSML｜invoke>\n\
             <｜DSML｜invoke name=\"g\">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
            called("Sure.", &[("weather", r#"{"city": "12", "more": {"a": [1]}}"#), ("g", "{}")]),
        ),
        (
            "functiongemma",
            "<start_function_call>call:weather{city:<escape>Pa,}ris<escape>,days:3,tags:[<escape>a<escape>,true],\
             at:{x:-1.5}}<end_function_call><start_function_call>call:g{}<end_function_call>",
            called(
                "",
                &[
                    ("weather", r#"{"city": "Pa,}ris", "days": 3, "tags": ["a", true], "at": {"x": -1.5}}"#),
                    ("g", "{}"),
                ],
            ),
        ),
        (
            "gemma4",
            "Look. <|tool_call>call:weather{city:<|\"|>New \"York\"<|\"|>}<tool_call|>",
            called("Look.", &[("weather", r#"{"city": "New \"York\""}"#)]),
        ),
        (
            "olmo3",
            "<function_calls>weather(city=\"Paris\")\ng()</function_calls>Done.",
            called("Done.", &[("weather", paris), ("g", "{}")]),
        ),
        (
            "openai",
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather \
             <|constrain|>json<|message|>{\"city\": \"Paris\"}<|call|><|start|>assistant<|channel|>commentary \
             to=functions.g<|message|>{}<|call|><|start|>assistant<|channel|>final<|message|>Done.<|return|>",
            called("I look.\nDone.", &[("weather", paris), ("g", "{}")]),
        ),
        (
            "openai",
            " to=functions.weather<|channel|>commentary json<|message|>{\"city\": \"Paris\"}<|call|>",
            called("", &[("weather", paris)]),
        ),
    ] {
        assert_eq!(turn_of(format, text), expected, "{format}: {text}");
    }
}

#[test]
fn what_is_no_call_is_content_as_it_stands() {
    for (format, text) in [
        ("hermes", "a < b <tool_cal and <tool_call>not JSON</tool_call> \n"),
        ("hermes", "<tool_call>{\"name\": 3}"),
        ("hermes", "<tool_call>{\"arguments\": {\"a\": 1}}"),
        ("hermes", "<tool_call>\n{\"name\": \"f\", \"argum"),
        ("llama3_json", " {\"name\": \"Bob\", \"age\": 3} "),
        ("llama3_json", "{\"a\": [1, 2"),
        ("llama3_json", "Say {\"name\": \"f\", \"parameters\": {}}"),
        ("mistral", "[TOOL_CALLS] no [1]"),
        ("qwen3_coder", "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}"),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[see(the note)]"),
        ("pythonic", "Then [f(a=1)]"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜>x<｜tool▁call▁begin｜>no name here"),
        ("glm45", "<tool_call>hello there</tool_call>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions."),
        ("minimax_m2", "<minimax:tool_call>\n<invoke name='f'>"),
        ("phi4_mini_json", "functools are tools"),
        ("granite", "<|tool_call|>[1, 2]"),
    ] {
        assert_eq!(turn_of(format, text), called(text, &[]), "{format}: {text}");
    }
}

#[test]
fn a_call_that_was_announced_stays() {
    for (format, text, arguments) in [
        ("hermes", r#"<tool_call>{"name": "weather", "arguments": {"city": "Par"#, r#"{"city": "Par"#),
        ("qwen3_coder", "<tool_call><function=weather><parameter=city>\nPar</para", r#"{"city": "Par</para"#),
        ("pythonic", "[weather(city='Par', days=1", r#"{"city": "Par""#),
    ] {
        let cut =
            Turn { calls: vec![("weather".to_owned(), arguments.to_owned(), false)], ..Turn::default() };
        assert_eq!(turn_of(format, text), cut, "{text}");
    }
    // What cannot be in the arguments ends them.
    let broken = turn_of("hermes", r#"<tool_call>{"name": "f", "arguments": {"a": 1 </tool_call> then"#);
    assert_eq!(broken, called("then", &[("f", r#"{"a": 1 "#)]));
}

#[test]
fn an_answer_that_is_cut_behind_a_call_says_no_part_of_a_marker_or_of_another_call() {
    for (format, text) in [
        (
            "hermes",
            "<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n{\"name\": \"f\"",
        ),
        ("mistral", "[TOOL_CALLS] [{\"name\": \"g\", \"arguments\": {}}, {\"name\": \"f\""),
        ("llama3_json", "{\"name\": \"g\", \"parameters\": {}}; {\"name\""),
        ("qwen3_coder", "<tool_call>\n<function=g>\n</function>\n</tool_call>\n<tool_call>\n<function=f"),
        ("seed_oss", "<seed:tool_call>\n<function=g>\n</function>\n</seed:tool_call>"),
        ("glm45", "<tool_call>g\n</tool_call>\n<tool_call>f"),
        ("minimax_m2", "<minimax:tool_call>\n<invoke name=\"g\">\n</invoke>\n</minimax:tool_call>"),
        (
            "deepseek_v31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁call▁begin｜>f<｜tool▁sep",
        ),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.g:0<|tool_call_argument_begin|>{}<|tool_call_end|>\
             <|tool_calls_section_end|>",
        ),
        ("lfm2", "<|tool_call_start|>[g()]<|tool_call_end|>"),
        ("olmo3", "<function_calls>g()\nf"),
        ("jamba", "<tool_calls>[\n{\"name\": \"g\", \"arguments\": {}}\n]</tool_calls>"),
        ("gemma4", "<|tool_call>call:g{}<tool_call|><|tool_call>call:f"),
    ] {
        let expected = called("", &[("g", "{}")]);
        let mut num_cuts = 0;
        for end in text.char_indices().map(|(at, _)| at).chain([text.len()]) {
            let turn = turn_of(format, &text[..end]);
            if turn.calls == expected.calls {
                assert_eq!(turn, expected, "{format}: {:?}", &text[..end]);
                num_cuts += 1;
            }
        }
        assert!(num_cuts > 2, "{format}: {num_cuts}");
    }
    for said in ["</tool_cal> and more", "Or <tool_call>", "<tool_call>not JSON"] {
        let text = format!("<tool_call>{{\"name\": \"g\"}}</tool_call>{said}");
        assert_eq!(turn_of("hermes", &text), called(said, &[("g", "{}")]), "what only looks like a marker");
    }
}

#[test]
fn thoughts_are_told_from_what_is_said() {
    let text =
        "<think>\n\nWhere is\n <tool_call>?\n</think>\n\nHere. <tool_call>{\"name\": \"f\"}</tool_call>";
    let expected =
        Turn { reasoning: "Where is\n <tool_call>?".to_owned(), ..called("Here.", &[("f", "{}")]) };
    assert_eq!(turn_of("hermes", text), expected);
    let alone = Turn { reasoning: "On and on".to_owned(), ..Turn::default() };
    assert_eq!(turn_of("hermes", "<think>On and on\n"), alone);
    assert_eq!(turn_of("llama3_json", "<think>On and on</think>\n"), alone);

    let kimi = ReasoningFormat::named("kimi_k2");
    let text = "<think>Let me<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}\
                <|tool_call_end|><|tool_calls_section_end|>";
    let parser = TurnParser::new(TurnFormat::named("kimi_k2"), kimi, tools(), false);
    for (at, _) in text.char_indices() {
        let turn = read(parser.clone(), [&text[..at], &text[at..]]);
        assert_eq!((&*turn.reasoning, turn.calls.len()), ("Let me", 1), "calls end thoughts, cut at {at}");
    }
    let without_calls = TurnParser::new(None, kimi, tools(), false);
    assert_eq!(read(without_calls, [text]).reasoning, text["<think>".len()..], "unless none are looked for");
    let granite = ReasoningFormat::named("granite");
    let turn = read(
        TurnParser::new(None, granite, tools(), false),
        ["Here is my thought pro", "cess: two.\nHere is my response:", " Four."],
    );
    assert_eq!((turn.reasoning.trim(), turn.content.trim()), ("two.", "Four."));
    let found = |template: &str| ReasoningFormat::of_template(template).map(|format| format.name);
    assert_eq!(found("<think></think><|tool_calls_section_begin|>"), Some("kimi_k2"));
    assert_eq!(found("<think></think>"), Some("qwen3"));
    assert_eq!(found("write it after 'Here is my response:'"), Some("granite"));

    let r1 = ReasoningFormat::named("deepseek_r1").expect("a format");
    let inside = TurnParser::new(None, Some(r1), Arc::default(), r1.begins_within("<|Assistant|>"));
    let turn = read(inside, ["so", " it is</th", "ink>Yes"]);
    assert_eq!((turn.reasoning.as_str(), turn.content.as_str()), ("so it is", "Yes"));
    let qwen = ReasoningFormat::named("glm45").expect("a format");
    for (prompt, is_inside) in [("hi", false), ("hi<think>\n", true), ("<think>\n\n</think>\n\n", false)] {
        assert_eq!(qwen.begins_within(prompt), is_inside, "{prompt}");
    }
}

#[test]
fn where_thoughts_come_once_their_marker_is_text_later() {
    let format = ReasoningFormat::named("qwen3");
    for (begins_within, text, reasoning, content) in [
        (false, r#"<think>Hm</think>{"a": "<think>b</think>"}"#, "Hm", r#"{"a": "<think>b</think>"}"#),
        (true, "Hm</think>\n<think>", "Hm", "<think>"),
        (false, r#"{"a": "<think>"}"#, "", r#"{"a": "<think>"}"#),
    ] {
        for size in [1, 3, text.len()] {
            let parser = TurnParser::new(None, format, tools(), begins_within).thinking_once();
            let pieces: Vec<&str> =
                (0..text.len()).step_by(size).map(|at| &text[at..(at + size).min(text.len())]).collect();
            let turn = read(parser, pieces);
            assert_eq!((&*turn.reasoning, &*turn.content), (reasoning, content), "{size}");
        }
    }
}

#[test]
fn calls_that_only_look_like_those_of_a_format_are_not_taken_for_it() {
    let found = |template: &str| TurnFormat::of_template(template).map(|format| format.name);
    for (template, expected) in [
        ("{{ tools }}<｜tool▁call▁begin｜>' + tc['type'] + '<｜tool▁sep｜>'", Some("deepseek_v3")),
        ("{{ tools }}</' + dsml_token + 'function_calls>", Some("deepseek_v32")),
        ("{{ tools }}<|tool_list_start|>[", Some("lfm2")),
        ("{{ tools }}<tool_calls>[{", Some("jamba")),
        ("{{ tools }}<tool_calls>\n{", None),
        ("{{ tools }}{\"tool_name\": \"f\", \"parameters\": {}}", None),
        ("{{ tools }}<function=f><parameter=k>", Some("qwen3_coder")),
        ("{{ tools }}<function=example_function_name>{\"k\": 1}</function>", None),
        ("{{ tools }}{%- set begin = ns_token ~ '<tool_call>' %}", None),
        ("{{ tools }}<atem:invoke name=\"f\"> \"parameters\": ", None),
    ] {
        assert_eq!(found(template), expected, "{template}");
    }
}

#[test]
fn what_is_held_back_is_bounded() {
    let mut parser = parser("hermes", None);
    parser.push("<tool_call>{\"arguments\": {\"a\": \"");
    let mut shown = 0;
    for _ in 0..10_000 {
        for event in parser.push("xxxxxxxxxx") {
            let TurnEvent::Content(text) = event else { panic!("no call was announced") };
            shown += text.len();
        }
    }
    assert!(shown > 90_000, "{shown}");
}

/// Calls of the hermes format by a search over the whole text.
fn naive_hermes(text: &str) -> (Vec<(String, Value)>, String) {
    let (mut calls, mut content) = (Vec::new(), String::new());
    let mut rest = text;
    while let Some((before, behind)) = rest.split_once("<tool_call>") {
        let (call, next) = behind.split_once("</tool_call>").expect("whole calls only");
        let call: Value = serde_json::from_str(call).expect("JSON");
        calls.push((call["name"].as_str().expect("a name").to_owned(), call["arguments"].clone()));
        content += before.trim();
        rest = next;
    }
    (calls, content + rest.trim())
}

fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        "[ -~é😀\n]{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[a-z\"{}]{1,3}", inner, 0..4)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

fn pieces<'a>(text: &'a str, cuts: &[prop::sample::Index]) -> Vec<&'a str> {
    let places: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
    let mut at: Vec<usize> = cuts.iter().map(|cut| *cut.get(&places)).chain([0, text.len()]).collect();
    at.sort_unstable();
    at.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_naive_twin_finds_the_same_calls(
        parts in prop::collection::vec(("[a-z <{]{0,6}", "[a-z_]{1,5}", json_value()), 0..4),
        tail in "[a-z. ]{0,6}",
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let mut text = String::new();
        for (said, name, value) in &parts {
            let value = json!({"v": value});
            let value = value.to_string().replace("</tool_call>", "");
            let _ = write!(text, "{said}<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {value}}}\n</tool_call>");
        }
        text += &tail;
        let turn = read(parser("hermes", None), pieces(&text, &cuts));
        let (calls, content) = naive_hermes(&text);
        let found: Vec<(String, Value)> = turn.calls.iter().map(|(name, arguments, is_whole)| {
            assert!(is_whole);
            (name.clone(), serde_json::from_str(arguments).expect("JSON"))
        }).collect();
        prop_assert_eq!(found, calls);
        let squeezed = |text: &str| text.replace(' ', "");
        prop_assert_eq!(squeezed(&turn.content), squeezed(&content));
    }

    #[test]
    fn no_cut_changes_a_turn_and_without_a_call_no_text_is_lost(
        format in prop::sample::select(TurnFormat::all().iter().map(|format| format.name).collect::<Vec<_>>()),
        parts in prop::collection::vec(prop::sample::select(vec![
            "<tool_call>", "</tool_call>", "{\"name\": \"weather\"", ", \"arguments\": ", "{\"city\": \"Pa\"", "}", "[",
            "]", "; ", "<function=weather>", "<parameter=city>", "\n", "</parameter>", "</function>", "weather(", "city=",
            "'x", "')", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "weather", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>",
            " ", "é", "<think>", "</think>", "\"parameters\": {", "\\",
        ]), 0..14),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let text = parts.concat();
        let parser = parser(format, Some("qwen3"));
        let whole = read(parser.clone(), [text.as_str()]);
        prop_assert_eq!(&read(parser, pieces(&text, &cuts)), &whole);
        if whole.calls.is_empty() && !text.contains("<think>") {
            prop_assert_eq!(whole.content, text);
        }
    }
}
