//! Turns of gpt-oss: messages in channels are content, reasoning and calls, however the text is cut.

mod support;

use std::sync::Arc;

use output::{ReasoningFormat, Tool, TurnFormat, TurnParser};
use serde_json::Map;

use support::turns::{Turn, read, read_in_all_cuts};

fn tools() -> Arc<[Tool]> {
    Arc::new([Tool { name: "weather".to_owned(), parameters: Map::new(), strict: false }])
}

/// The turn of messages, however it is cut.
fn messages_of(text: &str, finds: (bool, bool), begins_within: bool) -> Turn {
    let format = TurnFormat::named("openai").filter(|_| finds.0);
    let reasoning = ReasoningFormat::named("openai_gptoss").filter(|_| finds.1);
    read_in_all_cuts(&TurnParser::new(format, reasoning, tools(), begins_within), text)
}

fn message(reasoning: &str, content: &str, calls: &[(&str, &str, bool)]) -> Turn {
    let calls =
        calls.iter().map(|(name, args, ends)| ((*name).to_owned(), (*args).to_owned(), *ends)).collect();
    Turn { content: content.to_owned(), reasoning: reasoning.to_owned(), calls }
}

#[test]
fn channels_are_thoughts_what_is_said_and_calls() {
    let paris = r#"{"city": "Paris"}"#;
    for (text, expected) in [
        (
            "<|channel|>analysis<|message|>The user greets.<|end|><|start|>assistant<|channel|>final<|message|>Hello.",
            message("The user greets.", "Hello.", &[]),
        ),
        ("<|channel|>final<|message|>Hello.<|return|>", message("", "Hello.", &[])),
        ("<|channel|>final <|constrain|>json<|message|>{\"a\": 1}<|return|>", message("", "{\"a\": 1}", &[])),
        // Thoughts again after something was said, as before calls.
        (
            "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>\
             <|start|>assistant<|channel|>analysis<|message|>Yes.<|end|><|start|>assistant<|channel|>commentary \
             to=functions.weather <|constrain|>json<|message|>{\"city\": \"Paris\"}<|call|>",
            message("Hm.\nYes.", "Let me see.", &[("weather", paris, true)]),
        ),
        // The end of the answer is a token that is not part of the text.
        (
            "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"city\": \"Paris\"}",
            message("", "", &[("weather", paris, false)]),
        ),
        ("<|channel|>commentary to=functions.g json<|message|>", message("", "", &[("g", "{}", false)])),
        (
            "<|channel|>commentary to=functions.g json<|message|> \n<|call|>",
            message("", "", &[("g", "{}", true)]),
        ),
        // Other places of the recipient, and other channels.
        (
            " to=functions.g<|channel|>commentary json<|message|> {\"a\": [1, 2]}\n<|call|>",
            message("", "", &[("g", "{\"a\": [1, 2]}", true)]),
        ),
        (
            "<|start|>assistant<|channel|>analysis to=functions.g code<|message|>{}<|call|>",
            message("", "", &[("g", "{}", true)]),
        ),
        (
            "<|channel|>commentary to=weather<|message|>{\"city\": \"Paris\"}<|call|>",
            message("", "", &[("weather", paris, true)]),
        ),
        (
            " to=weather<|channel|>commentary json<|message|>{\"city\": \"Paris\"}<|call|>",
            message("", "", &[("weather", paris, true)]),
        ),
        (" to=python<|channel|>analysis code<|message|>print(1)<|call|>", message("print(1)", "", &[])),
        (" to=browser.search<|channel|>commentary<|message|>{}<|call|>", message("{}", "", &[])),
        ("<|channel|> analysis<|message|>Hm.<|end|>", message("Hm.", "", &[])),
        ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", message("print(1)", "", &[])),
        ("<|channel|>commentary to=browser.search<|message|>{}<|call|>", message("{}", "", &[])),
        ("<|channel|>musing<|message|>So.<|end|>", message("", "So.", &[])),
        ("<|message|>So.<|end|>", message("", "So.", &[])),
        // Marks that are missing.
        (
            "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>Hi",
            message("Hm.", "Hi", &[]),
        ),
        ("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Hi", message("Hm.", "Hi", &[])),
        (
            "<|channel|>analysis<|message|>Hm.<|end|>\n\n<|channel|>final<|message|>Hi",
            message("Hm.", "Hi", &[]),
        ),
        ("<|channel|>analysis<|message|>Hm.<|end|> So it is.", message("Hm.", " So it is.", &[])),
        ("<|start|>assistant<|start|>assistant<|channel|>final<|message|>Hi", message("", "Hi", &[])),
        ("<|channel|>final<|end|><|start|>assistant<|channel|>final<|message|>Hi", message("", "Hi", &[])),
        // Cut off in a head, and within what might have been one.
        ("<|channel|>", message("", "", &[])),
        ("<|channel|>anal", message("", "", &[])),
        ("<|channel|>commentary to=functions.weather but no message", message("", "", &[])),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assi", message("Hm.", "", &[])),
        ("<|channel|>analysis<|message|>Hm.<|channel|>", message("Hm.", "", &[])),
        // No messages at all.
        ("", message("", "", &[])),
        ("{\"a\": 1}", message("", "{\"a\": 1}", &[])),
        (" to be or not", message("", " to be or not", &[])),
        (" to=x, so it is", message("", " to=x, so it is", &[])),
        (
            " to=x, so it is.<|end|><|start|>assistant<|channel|>final<|message|>Hi",
            message("", " to=x, so it is.\nHi", &[]),
        ),
        ("\n <|chan", message("", "\n <|chan", &[])),
        ("5 <| 6 <|channel|>x and <|message|>", message("", "5 <| 6 <|channel|>x and <|message|>", &[])),
    ] {
        assert_eq!(messages_of(text, (true, true), false), expected, "{text}");
    }
    let rest = "so.<|end|><|start|>assistant<|channel|>final<|message|>Hi";
    assert_eq!(messages_of(rest, (false, true), true), message("so.", "Hi", &[]));
}

#[test]
fn a_head_that_does_not_end_is_content() {
    let long = format!("<|channel|>{}<|message|>Hi", "é".repeat(700));
    assert_eq!(messages_of(&long, (true, true), false), message("", &long, &[]));
    let short = format!("<|channel|>{}<|message|>Hi", "é".repeat(500));
    assert_eq!(messages_of(&short, (true, true), false), message("", "Hi", &[]));
}

#[test]
fn channels_are_told_apart_without_tools_and_without_reasoning() {
    let text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary \
                to=functions.g<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>Hi";
    assert_eq!(messages_of(text, (false, true), false), message("Hm.", "{}\nHi", &[]));
    assert_eq!(messages_of(text, (true, false), false), message("", "Hm.\nHi", &[("g", "{}", true)]));
    // Marks of gpt-oss with another format of calls: as every other format.
    let mixed =
        TurnParser::new(TurnFormat::named("hermes"), ReasoningFormat::named("openai_gptoss"), tools(), false);
    let turn = read(
        mixed,
        ["<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<tool_call>{\"name\": \"g\"}"],
    );
    assert_eq!((turn.reasoning.as_str(), turn.calls.len()), ("Hm.", 1));
}

#[test]
fn prompts_of_messages_end_within_thoughts_or_not() {
    let format = ReasoningFormat::named("openai_gptoss").expect("a format");
    let user = "<|start|>user<|message|>Hi<|end|>";
    for (prompt, is_within) in [
        (format!("{user}<|start|>assistant"), false),
        (format!("{user}<|start|>assistant<|channel|>analysis<|message|>The user"), true),
        (format!("{user}<|start|>assistant<|channel|>final<|message|>Well"), false),
        (format!("{user}<|start|>assistant<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"), false),
        (
            "<|start|>user<|message|><|channel|>analysis<|message|>Hi<|end|><|start|>assistant".to_owned(),
            false,
        ),
        ("<|start|>user<|message|>Hi".to_owned(), false),
        (String::new(), false),
    ] {
        assert_eq!(format.begins_within(&prompt), is_within, "{prompt}");
    }
}
