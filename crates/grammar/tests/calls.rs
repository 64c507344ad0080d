//! The grammar of a format of calls: what it accepts the parser reads back, and it accepts nothing that is wrong.

use std::collections::HashMap;
use std::sync::Arc;

use grammar::accepts;
use llguidance::{Matcher, ParserFactory, api::TopLevelGrammar};
use output::{CallGrammar, ReasoningFormat, Thinking, Tool, TurnEvent, TurnFormat, TurnParser};
use scheduler::{GrammarKind, GrammarSpec};
use serde_json::{Map, Value, json};
use toktrie::ApproximateTokEnv;

const NUM_WALKS: u64 = 20;

fn tool(name: &str, parameters: Value) -> Tool {
    let Value::Object(parameters) = parameters else { panic!("an object") };
    Tool { name: name.to_owned(), parameters, strict: true }
}

fn tools() -> Vec<Tool> {
    vec![
        tool(
            "get_weather",
            json!({"type": "object", "properties": {
                "city": {"type": "string", "maxLength": 6},
                "unit": {"enum": ["C", "F"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "deep": {"$ref": "#/$defs/deep"},
            }, "required": ["city", "days"], "additionalProperties": false,
            "$defs": {"deep": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}}}),
        ),
        tool(
            "set.it",
            json!({"type": "object", "additionalProperties": false, "properties": {
                "on": {"type": "boolean"}, "why": {"type": "null"},
            }}),
        ),
    ]
}

fn grammar<'a>(format: &str, tools: &'a [Tool], ids: &'a HashMap<String, u32>) -> CallGrammar<'a> {
    CallGrammar {
        format: TurnFormat::named(format).expect("a format"),
        tools: tools.iter().collect(),
        is_parallel: true,
        thinking: Thinking::None,
        ids,
    }
}

fn spec(lark: &str) -> GrammarSpec {
    GrammarSpec::new(GrammarKind::Grammar, lark)
}

fn is_valid(name: &str, arguments: &Map<String, Value>) -> bool {
    let one_of = |key: &str, is: &dyn Fn(&Value) -> bool| arguments.get(key).is_none_or(is);
    match name {
        "get_weather" => {
            arguments.keys().all(|key| ["city", "unit", "days", "deep"].contains(&key.as_str()))
                && arguments["city"].as_str().is_some_and(|city| city.chars().count() <= 6)
                && arguments["days"].as_i64().is_some_and(|days| (1..=9).contains(&days))
                && one_of("unit", &|unit| *unit == json!("C") || *unit == json!("F"))
                && one_of("deep", &|deep| {
                    deep.as_array().is_some_and(|deep| deep.len() <= 2 && deep.iter().all(Value::is_boolean))
                })
        }
        "set.it" => {
            arguments.keys().all(|key| ["on", "why"].contains(&key.as_str()))
                && one_of("on", &Value::is_boolean)
                && one_of("why", &Value::is_null)
        }
        _ => false,
    }
}

/// A text that obeys a grammar, byte by byte; none if it does not come to an end.
fn walk(matcher: &mut Matcher, seed: u64) -> Option<Vec<u8>> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut text = Vec::new();
    for _ in 0..1500 {
        if matcher.is_stopped() {
            return Some(text);
        }
        let mask = matcher.compute_mask().expect("a mask");
        let allowed: Vec<u32> = (0..256).filter(|&byte| mask.is_allowed(byte)).collect();
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let may_end = matcher.is_accepting().expect("a state");
        if allowed.is_empty() || (may_end && state.is_multiple_of(3)) {
            assert!(may_end, "{:?}", String::from_utf8_lossy(&text));
            return Some(text);
        }
        // What ends a text is rare among bytes, and other than ASCII needs several: both get their share.
        let ends: Vec<u32> =
            allowed.iter().copied().filter(|byte| b"\"\n<}".contains(&(*byte as u8))).collect();
        let from = if !ends.is_empty() && state % 4 == 1 { &ends } else { &allowed };
        let byte = from[(state >> 16) as usize % from.len()];
        matcher.consume_token(byte).expect("an allowed byte");
        text.push(byte as u8);
    }
    None
}

fn calls_of(format: &str, tools: &[Tool], text: &str) -> Vec<(String, Map<String, Value>)> {
    let format = TurnFormat::named(format).expect("a format");
    let mut parser = TurnParser::new(Some(format), None, Arc::from(tools), false);
    let events =
        text.char_indices().flat_map(|(at, char)| parser.push(&text[at..at + char.len_utf8()])).collect();
    let mut calls: Vec<(String, String)> = Vec::new();
    let mut num_whole = 0;
    for event in [events, parser.finish()].concat() {
        match event {
            TurnEvent::CallBegin { name, .. } => calls.push((name, String::new())),
            TurnEvent::CallArgs(text) => calls.last_mut().expect("a call").1.push_str(&text),
            TurnEvent::CallEnd => num_whole += 1,
            TurnEvent::Content(text) | TurnEvent::Reasoning(text) => panic!("{text:?} is not a call"),
        }
    }
    assert_eq!(num_whole, calls.len(), "{text}");
    let read = |(name, arguments): (String, String)| {
        let arguments =
            serde_json::from_str(&arguments).unwrap_or_else(|error| panic!("{error}: {arguments}"));
        (name, arguments)
    };
    calls.into_iter().map(read).collect()
}

#[test]
fn the_parser_reads_back_what_the_grammar_accepts() {
    let factory = ParserFactory::new_simple(&ApproximateTokEnv::single_byte_env()).expect("a factory");
    let tools = tools();
    for format in TurnFormat::all() {
        let ids = HashMap::new();
        let lark = grammar(format.name, &tools, &ids).of_calls().expect("a grammar");
        let mut num_calls = HashMap::new();
        for seed in 0..NUM_WALKS {
            let parser = factory.create_parser(TopLevelGrammar::from_lark(lark.clone()));
            let Some(text) = walk(&mut Matcher::new(parser), seed) else { continue };
            let text = String::from_utf8(text).expect("Unicode");
            let calls = calls_of(format.name, &tools, &text);
            assert!(!calls.is_empty(), "{}: {text}", format.name);
            for (name, arguments) in calls {
                assert!(is_valid(&name, &arguments), "{}: {name} {arguments:?} in {text:?}", format.name);
                *num_calls.entry(name).or_insert(0) += 1;
            }
        }
        assert!(
            num_calls.len() == 2 && num_calls.values().sum::<usize>() > 12,
            "{}: {num_calls:?}",
            format.name
        );
    }
}

#[test]
fn one_call_or_several_thoughts_and_json_instead() {
    let (tools, ids) = (tools(), HashMap::new());
    let mut grammar = grammar("hermes", &tools, &ids);
    let call = r#"<tool_call>
{"name": "set.it", "arguments": {"on":true}}
</tool_call>"#;
    let two = format!("{call}\n{call}");
    let accepted = |lark: &str, text: &str| accepts(&spec(lark), text).expect("a grammar");
    let lark = grammar.of_calls().expect("a grammar");
    assert!(accepted(&lark, call) && accepted(&lark, &two));
    for wrong in
        ["", "Hm", &call.replace("true", "1"), &call.replace("set.it", "set"), &format!("{call} then")]
    {
        assert!(!accepted(&lark, wrong), "{wrong}");
    }
    let schema = json!({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]});
    let lark = grammar.of_calls_or_json(schema.as_object().expect("an object")).expect("a grammar");
    assert!(accepted(&lark, call) && accepted(&lark, r#"{"a": null}"#) && !accepted(&lark, r#"{"a": 1}"#));
    grammar.is_parallel = false;
    let lark = grammar.of_calls().expect("a grammar");
    assert!(accepted(&lark, call) && !accepted(&lark, &two));

    let qwen = ReasoningFormat::named("qwen3").expect("a format");
    grammar.thinking = Thinking::MayBegin(qwen);
    let lark = grammar.of_calls().expect("a grammar");
    let thought = format!("<think>\nHm, <tool_call>?\n</think>\n\n{call}");
    assert!(accepted(&lark, call) && accepted(&lark, &thought) && !accepted(&lark, "<think>Hm"));
    grammar.thinking = Thinking::HasBegun(qwen);
    let lark = grammar.of_calls().expect("a grammar");
    assert!(accepted(&lark, &thought["<think>".len()..]) && !accepted(&lark, call));
}

#[test]
fn calls_of_strict_tools_are_held_to_their_schema_among_text() {
    let ids = HashMap::new();
    let mut tools = tools();
    tools[0].strict = false;
    for format in ["hermes", "qwen3_coder", "mistral", "mistral_args", "deepseek_v31"] {
        let lark = grammar(format, &tools, &ids).of_text_and_calls(false).expect("tools").expect("a marker");
        let accepted = |text: &str| {
            accepts(&spec(&lark), text).unwrap_or_else(|error| panic!("{format}: {error}\n{lark}"))
        };
        assert!(accepted("") && accepted("No <tool_ [TOOL< at all."), "{format}");
        let call = match format {
            "hermes" => "<tool_call>\n{\"name\": \"set.it\", \"arguments\": {\"on\": true}}\n</tool_call>",
            "mistral" => r#"[TOOL_CALLS][{"name": "set.it", "arguments": {"on": true}}]"#,
            "mistral_args" => r#"[TOOL_CALLS]set.it[ARGS]{"on": true}"#,
            "qwen3_coder" => {
                "<tool_call>\n<function=set.it>\n<parameter=on>\ntrue\n</parameter>\n</function>\n</tool_call>"
            }
            _ => {
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>set.it<｜tool▁sep｜>{\"on\": true}<｜tool▁call▁end｜>\
                 <｜tool▁calls▁end｜>"
            }
        };
        assert!(accepted(call) && accepted(&format!("Well: {call}")), "{format}: {lark}");
        assert!(
            !accepted(&call.replace("true", "1")) && !accepted(&call.replace("set.it", "set")),
            "{format}"
        );
    }
    // The tool that is not strict takes any object.
    let lark = grammar("hermes", &tools, &ids).of_text_and_calls(false).expect("tools").expect("a marker");
    let loose = "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"x\": [1]}}\n</tool_call>";
    assert!(accepts(&spec(&lark), loose).expect("a grammar"));
    let lark = grammar("hermes", &tools, &ids).of_text_and_calls(true).expect("tools").expect("a marker");
    assert!(!accepts(&spec(&lark), loose).expect("a grammar"), "unless all have to obey");
    // Without a marker, text and calls look alike.
    assert_eq!(grammar("llama3_json", &tools, &ids).of_text_and_calls(false), Ok(None));
}

#[test]
fn messages_have_heads_and_their_calls_are_held_to_their_schema() {
    let (mut tools, ids) = (tools(), HashMap::new());
    tools[0].strict = false;
    let thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant";
    let call = "<|channel|>commentary to=functions.set.it <|constrain|>json<|message|>{\"on\": true}";
    let schema = json!({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]});
    let schema = schema.as_object().expect("an object");
    let gptoss = ReasoningFormat::named("openai_gptoss").expect("a format");
    let mut grammar = grammar("openai", &tools, &ids);
    grammar.thinking = Thinking::MayBegin(gptoss);
    let accepted =
        |lark: &str, text: &str| accepts(&spec(lark), text).unwrap_or_else(|error| panic!("{error}\n{lark}"));
    let lark = grammar.of_text_and_calls(false).expect("tools").expect("a grammar");
    for said in [
        "<|channel|>final<|message|>Hi, 5 <| 6.",
        "<|channel|>final <|constrain|>json<|message|>{}",
        "<|channel|>analysis<|message|>Hm.",
        call,
        &format!("{call}<|call|>"),
    ] {
        let preamble = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant";
        for text in [said, &format!("{thought}{said}"), &format!("{thought}{preamble}{thought}{said}")] {
            assert!(accepted(&lark, text), "{text}\n{lark}");
        }
    }
    for wrong in
        ["Hi", "<|channel|>loud<|message|>", &call.replace("true", "1"), &call.replace("set.it", "set")]
    {
        assert!(!accepted(&lark, wrong) && !accepted(&lark, &format!("{thought}{wrong}")), "{wrong}");
    }
    let lark = grammar.of_calls_or_json(schema).expect("a grammar");
    let answer = "<|channel|>final<|message|>{\"a\": null}";
    assert!(
        accepted(&lark, answer) && accepted(&lark, &format!("{thought}{answer}")) && accepted(&lark, call)
    );
    assert!(!accepted(&lark, "<|channel|>final<|message|>Hi") && !accepted(&lark, "{\"a\": null}"));
    let remark = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant";
    assert!(
        accepted(&lark, &format!("{thought}{remark}{call}"))
            && !accepted(&lark, &format!("{remark}{answer}"))
    );
    let lark = grammar.of_calls().expect("a grammar");
    let whole = format!("{call}<|call|>");
    assert!(
        accepted(&lark, &whole) && accepted(&lark, &format!("{thought}{whole}")) && !accepted(&lark, answer)
    );
    grammar.thinking = Thinking::HasBegun(gptoss);
    let lark = grammar.of_text_and_calls(false).expect("tools").expect("a grammar");
    assert!(accepted(&lark, "Hm") && accepted(&lark, &format!("Hm<|end|><|start|>assistant{call}")));
    // Marks that are tokens stand as such.
    let marks = [("<|start|>", 6), ("<|channel|>", 5), ("<|message|>", 8), ("<|end|>", 7), ("<|call|>", 12)];
    let ids: HashMap<String, u32> = marks.iter().map(|(mark, id)| ((*mark).to_owned(), *id)).collect();
    grammar.ids = &ids;
    let lark = grammar.of_text_and_calls(false).expect("tools").expect("a grammar");
    assert!(lark.contains("next: <[6]> \"assistant\"\n"), "{lark}");
    assert!(lark.contains("closed: /(?s:.*)/ <[7]>\n"), "{lark}");
    assert!(
        lark.contains(
            "calls: <[5]> \"commentary\" \" to=functions.\" call (<[12]> <[6]> \"assistant\" <[5]>"
        ),
        "{lark}"
    );
    assert!(accepts(&spec(&lark), "\u{5}final\u{8}Hi").is_ok(), "it compiles\n{lark}");
}

#[test]
fn markers_that_are_tokens_stand_as_such() {
    let tools = tools();
    let ids = HashMap::from([("[TOOL_CALLS]".to_owned(), 5), ("[ARGS]".to_owned(), 32)]);
    let lark = grammar("mistral_args", &tools, &ids).of_calls().expect("a grammar");
    assert!(lark.contains("calls: <[5]> call (<[5]> call)*\n"), "{lark}");
    assert!(lark.contains("f1: \"set.it\" <[32]> f1_args\n"), "{lark}");
    let lark = grammar("mistral", &tools, &ids).of_text_and_calls(false).expect("tools").expect("a marker");
    assert!(lark.contains("\ncalls: \"[\" call (\", \" call)* \"]\"\n"), "{lark}");
    assert!(lark.contains("\ntext: /(?s:.*)/ <[5]>\n"), "{lark}");
}

#[test]
fn what_a_format_cannot_be_held_to_is_refused_by_name() {
    let ids = HashMap::new();
    let of = |property: Value| json!({"type": "object", "properties": {"a": property}});
    for (format, parameters, expected) in [
        ("qwen3_coder", of(json!({"type": "string", "pattern": "a+"})), "pattern of a text"),
        ("qwen3_coder", of(json!({"enum": ["</parameter>"]})), "</parameter>"),
        ("qwen3_coder", json!({"anyOf": [{"type": "object"}]}), "anyOf of all parameters"),
        ("qwen3_coder", json!({"properties": {"a>b": {}}}), "\"a>b\" cannot be the name"),
        ("glm45", of(json!({"const": "</arg_value>"})), "</arg_value>"),
        ("pythonic", json!({"properties": {"a b": {}}}), "\"a b\" cannot be the name"),
        ("pythonic", of(json!({"items": {"$ref": "#/properties/a"}})), "#/properties/a"),
        ("functiongemma", of(json!({"type": "object"})), "a value that is not a text"),
        ("gemma4", of(json!({"type": "string", "pattern": "a"})), "pattern of a text"),
        ("functiongemma", of(json!({"$ref": "#/$defs/none"})), "#/$defs/none"),
        ("hermes", json!({"type": "array"}), "parameters of the type \"array\""),
    ] {
        let tools = [tool("f", parameters)];
        let error = grammar(format, &tools, &ids).of_calls().expect_err(expected).to_string();
        assert!(error.contains(expected) && error.contains(format) && error.contains("\"f\""), "{error}");
    }
}
