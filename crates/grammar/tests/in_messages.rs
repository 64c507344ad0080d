//! Answers in messages (gpt-oss): thoughts are free, and the answer alone is what was asked for.

use std::collections::HashMap;

use grammar::{GrammarError, accepts, check, in_messages};
use scheduler::{GrammarKind, GrammarSpec};

const THOUGHT: &str = "<|channel|>analysis<|message|>{\"Hm\n<|end|><|start|>assistant";
const HEADS: [&str; 3] = [
    "<|channel|>final<|message|>",
    "<|channel|>final json<|message|>",
    "<|channel|>final <|constrain|>json<|message|>",
];
const SCHEMA: &str = r#"{"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}"#;

/// A grammar of each kind, what it accepts, and what it does not.
fn kinds() -> Vec<(GrammarSpec, &'static str, &'static str)> {
    let spec = GrammarSpec::new;
    let closed = GrammarSpec {
        disable_any_whitespace: true,
        disable_additional_properties: true,
        ..spec(GrammarKind::JsonSchema, SCHEMA)
    };
    vec![
        (spec(GrammarKind::JsonSchema, SCHEMA), r#"{ "a": null, "b": 1}"#, r#"{"a": 1}"#),
        (closed, r#"{"a":null}"#, r#"{"a": null}"#),
        (spec(GrammarKind::JsonSchema, "true"), "[1]", "one"),
        (spec(GrammarKind::JsonObject, ""), r#"{"b": [1, 2]}"#, "[1]"),
        (spec(GrammarKind::Regex, r"[0-9]{3}/\d\n?"), "123/4\n", "123/"),
        (spec(GrammarKind::Choice, r#"["yes", "no \"it\"", "a/b"]"#), "no \"it\"", "maybe"),
        (spec(GrammarKind::Grammar, "start: \"a\" start | WORD\nWORD: /b{2}/"), "aabb", "ab"),
        (spec(GrammarKind::Grammar, "root ::= \"<\" [x-z]{2,3} \">\""), "<xyz>", "<x>"),
    ]
}

fn framed(spec: &GrammarSpec, begins_within: bool) -> impl Fn(&str) -> bool {
    let framed = in_messages(spec, &HashMap::new(), begins_within).expect("a grammar");
    move |text| accepts(&framed, text).unwrap_or_else(|error| panic!("{error}\n{}", framed.text))
}

#[test]
fn the_answer_obeys_behind_any_number_of_thoughts() {
    for (spec, good, bad) in kinds() {
        assert!(
            accepts(&spec, good).expect("a grammar") && !accepts(&spec, bad).expect("a grammar"),
            "{bad}"
        );
        let accepted = framed(&spec, false);
        for head in HEADS {
            for before in [String::new(), THOUGHT.to_owned(), THOUGHT.repeat(3)] {
                assert!(accepted(&format!("{before}{head}{good}")), "{before}{head}{good}");
                assert!(!accepted(&format!("{before}{head}{bad}")), "{before}{head}{bad}");
            }
        }
    }
}

#[test]
fn nothing_else_is_said_and_the_answer_comes() {
    let remark = "<|channel|>commentary<|message|>Hi<|end|><|start|>assistant";
    for (spec, good, _) in kinds() {
        let (accepted, answer) = (framed(&spec, false), format!("{}{good}", HEADS[0]));
        assert!(accepted(&answer));
        for wrong in [
            good.to_owned(),
            THOUGHT.to_owned(),
            format!("{THOUGHT}{good}"),
            format!("{remark}{answer}"),
            format!("{answer}<|end|><|start|>assistant{answer}"),
            HEADS[0].to_owned(),
        ] {
            assert!(!accepted(&wrong), "{wrong}");
        }
    }
}

#[test]
fn a_prompt_that_ends_within_thoughts_is_gone_on_with() {
    for (spec, good, _) in kinds() {
        let accepted = framed(&spec, true);
        let rest = format!("Hm.<|end|><|start|>assistant{}{good}", HEADS[0]);
        assert!(
            accepted(&rest) && accepted(&format!("Hm.<|end|><|start|>assistant{THOUGHT}{}{good}", HEADS[0]))
        );
        assert!(!accepted("Hm.") && !accepted("Hm.<|end|>") && !accepted(&format!("{}{good}", HEADS[0])));
    }
}

#[test]
fn marks_that_are_tokens_stand_as_such() {
    let marks =
        [("<|start|>", 6), ("<|channel|>", 5), ("<|message|>", 8), ("<|end|>", 7), ("<|constrain|>", 9)];
    let ids: HashMap<String, u32> = marks.iter().map(|(mark, id)| ((*mark).to_owned(), *id)).collect();
    for (spec, ..) in kinds() {
        let framed = in_messages(&spec, &ids, false).expect("a grammar");
        assert!(
            !framed.text.contains("<|") && framed.text.contains("next: <[6]> \"assistant\"\n"),
            "{}",
            framed.text
        );
        assert_eq!(check(&framed), Ok(()));
    }
}

#[test]
fn what_is_no_grammar_is_refused_as_without_messages() {
    for (kind, text) in [
        (GrammarKind::JsonSchema, "{"),
        (GrammarKind::JsonSchema, "false"),
        (GrammarKind::Choice, "[]"),
        (GrammarKind::Grammar, "root ::= ("),
    ] {
        let spec = GrammarSpec::new(kind, text);
        assert_eq!(in_messages(&spec, &HashMap::new(), false).err(), check(&spec).err(), "{text}");
        assert!(check(&spec).is_err());
    }
    let long = GrammarSpec::new(
        GrammarKind::Grammar,
        &format!("start: \"{}\"", "a".repeat(grammar::MAX_GRAMMAR_BYTES - 20)),
    );
    let error = in_messages(&long, &HashMap::new(), false).expect_err("too long with its messages");
    assert!(matches!(error, GrammarError::TooLarge { limit: grammar::MAX_GRAMMAR_BYTES, .. }), "{error}");
}
