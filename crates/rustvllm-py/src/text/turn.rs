//! `_core.Tools`, `_core.TurnReading` and `_core.TurnParser`: calls of tools, as grammars and read from a model's text.

use std::collections::HashMap;
use std::sync::Arc;

use ::grammar::{Places, check_tools, relax_tool};
use output::{CallGrammar, ReasoningFormat, Thinking, Tool, TurnEvent, TurnFormat, TurnParser, TurnReading};
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::errors::InvalidRequestError;

/// Most places that are listed of what is not enforced in the schemas of the tools of a request.
const MAX_LISTED_PLACES: usize = 64;

/// Functions that a model may call.
#[pyclass(frozen, name = "Tools", module = "rustvllm._core")]
pub(crate) struct PyTools {
    tools: Arc<[Tool]>,
}

#[pymethods]
impl PyTools {
    #[new]
    fn new(tools: Vec<(String, String, bool)>) -> PyResult<Self> {
        let read = |(name, parameters, strict): (String, String, bool)| {
            let parameters = Tool::read_parameters(&parameters).map_err(PyValueError::new_err)?;
            Ok(Tool { name, parameters, strict })
        };
        Ok(Self { tools: tools.into_iter().map(read).collect::<PyResult<_>>()? })
    }

    /// Raise InvalidRequestError about the first schema that cannot be enforced. Releases the interpreter.
    fn check(&self, py: Python<'_>, only_strict: bool) -> PyResult<()> {
        let checked = py.detach(|| {
            let obeyed = self.tools.iter().filter(|tool| tool.strict || !only_strict);
            check_tools(obeyed.map(|tool| (&*tool.name, &tool.parameters)))
        });
        checked.map_err(|error| InvalidRequestError::new_err((error, "tools")))
    }

    /// The same tools without what cannot be enforced of those that are not strict; its places, and how many they are.
    fn relaxed(&self, py: Python<'_>) -> (Self, Vec<String>, usize) {
        let mut places = Places::default();
        let tools = py.detach(|| {
            let relaxed = |tool: &Tool| {
                let mut tool = tool.clone();
                let num_before = places.pointers.len();
                if !tool.strict {
                    relax_tool(&mut tool.parameters, MAX_LISTED_PLACES, &mut places);
                }
                for pointer in &mut places.pointers[num_before..] {
                    *pointer = format!("{}#{pointer}", tool.name);
                }
                tool
            };
            self.tools.iter().map(relaxed).collect()
        });
        (Self { tools }, places.pointers, places.count)
    }

    /// A grammar of calls; None where text and calls look alike.
    #[pyo3(signature = (call_format, *, kind="calls", parallel=true, thinking=None, begins_within=false, ids=HashMap::new(), schema="{}", all_obey=false))]
    #[expect(clippy::too_many_arguments, reason = "each is a keyword in Python")]
    fn grammar(
        &self,
        py: Python<'_>,
        call_format: &str,
        kind: &str,
        parallel: bool,
        thinking: Option<&str>,
        begins_within: bool,
        ids: HashMap<String, u32>,
        schema: &str,
        all_obey: bool,
    ) -> PyResult<Option<String>> {
        let thinking = match thinking.map(reasoning_format).transpose()? {
            None => Thinking::None,
            Some(format) if begins_within => Thinking::HasBegun(format),
            Some(format) => Thinking::MayBegin(format),
        };
        let tools = self.tools.iter().collect();
        let grammar = CallGrammar {
            format: turn_format(call_format)?,
            tools,
            is_parallel: parallel,
            thinking,
            ids: &ids,
        };
        let schema = Tool::read_parameters(schema).map_err(PyValueError::new_err)?;
        let written = py.detach(|| match kind {
            "text" => grammar.of_text_and_calls(all_obey),
            "json" => grammar.of_calls_or_json(&schema).map(Some),
            _ => grammar.of_calls().map(Some),
        });
        written.map_err(|error| InvalidRequestError::new_err((error.to_string(), "tools")))
    }
}

/// How the answers of one request are read.
#[pyclass(frozen, name = "TurnReading", module = "rustvllm._core")]
pub(crate) struct PyTurnReading {
    inner: Arc<TurnReading>,
}

impl PyTurnReading {
    pub(crate) fn shared(&self) -> Arc<TurnReading> {
        Arc::clone(&self.inner)
    }
}

#[pymethods]
impl PyTurnReading {
    #[new]
    #[pyo3(signature = (
        call_format=None, reasoning=None, tools=None, begins_within=false, *, thinks_once=false, parallel=true,
        reasoning_fields=None
    ))]
    fn new(
        call_format: Option<&str>,
        reasoning: Option<&str>,
        tools: Option<&PyTools>,
        begins_within: bool,
        thinks_once: bool,
        parallel: bool,
        reasoning_fields: Option<Vec<String>>,
    ) -> PyResult<Self> {
        let format = call_format.map(turn_format).transpose()?;
        let reasoning = reasoning.map(reasoning_format).transpose()?;
        let tools = tools.map_or_else(Arc::default, |tools| Arc::clone(&tools.tools));
        let mut inner = TurnReading::new(format, reasoning, tools, begins_within);
        if thinks_once {
            inner = inner.thinking_once();
        }
        if !parallel {
            inner = inner.with_one_call();
        }
        if let Some(fields) = reasoning_fields {
            inner = inner.with_reasoning_in(fields);
        }
        Ok(Self { inner: Arc::new(inner) })
    }
}

/// Reads one answer while it comes.
#[pyclass(name = "TurnParser", module = "rustvllm._core")]
pub(crate) struct PyTurnParser {
    inner: TurnParser,
}

type Event = (&'static str, String);

#[pymethods]
impl PyTurnParser {
    #[new]
    fn new(reading: &PyTurnReading) -> Self {
        Self { inner: reading.inner.parser() }
    }

    /// Take more text; what became certain of it.
    fn push(&mut self, text: &str) -> Vec<Event> {
        shown(self.inner.push(text))
    }

    /// The text has ended; what was held back.
    fn finish(&mut self) -> Vec<Event> {
        shown(self.inner.finish())
    }
}

fn shown(events: Vec<TurnEvent>) -> Vec<Event> {
    let shown = |event| match event {
        TurnEvent::Content(text) => ("content", text),
        TurnEvent::Reasoning(text) => ("reasoning", text),
        TurnEvent::CallBegin { name, .. } => ("call", name),
        TurnEvent::CallArgs(text) => ("arguments", text),
        TurnEvent::CallEnd => ("end", String::new()),
    };
    events.into_iter().map(shown).collect()
}

fn turn_format(name: &str) -> PyResult<&'static TurnFormat> {
    TurnFormat::named(name).ok_or_else(|| PyValueError::new_err(format!("{name:?} is not a format of calls")))
}

fn reasoning_format(name: &str) -> PyResult<&'static ReasoningFormat> {
    ReasoningFormat::named(name)
        .ok_or_else(|| PyValueError::new_err(format!("{name:?} is not a format of reasoning")))
}

/// The formats of calls, with their other names.
#[pyfunction]
fn tool_call_formats() -> Vec<(&'static str, Vec<&'static str>)> {
    TurnFormat::all().iter().map(|format| (format.name, format.aliases.to_vec())).collect()
}

/// The formats of reasoning, with their other names.
#[pyfunction]
fn reasoning_formats() -> Vec<(&'static str, Vec<&'static str>)> {
    ReasoningFormat::all().iter().map(|format| (format.name, format.aliases.to_vec())).collect()
}

/// The format in which a chat template writes calls.
#[pyfunction]
fn find_tool_call_format(template: &str) -> Option<&'static str> {
    TurnFormat::of_template(template).map(|format| format.name)
}

/// The format in which a chat template marks thoughts.
#[pyfunction]
fn find_reasoning_format(template: &str) -> Option<&'static str> {
    ReasoningFormat::of_template(template).map(|format| format.name)
}

/// Markers that a grammar of the format has, and what ids of calls look like.
#[pyfunction]
fn tool_call_format_facts(name: &str) -> PyResult<(Vec<&'static str>, &'static str)> {
    let format = turn_format(name)?;
    Ok((format.markers().collect(), format.ids.name()))
}

/// What begins thoughts and what ends them, in a format.
#[pyfunction]
fn reasoning_markers(name: &str) -> PyResult<(&'static str, &'static str)> {
    let format = reasoning_format(name)?;
    Ok((format.open, format.close))
}

/// Texts around thoughts, and around all that is said, that may be special tokens.
#[pyfunction]
fn special_reasoning_markers(name: &str) -> PyResult<Vec<&'static str>> {
    Ok(reasoning_format(name)?.markers())
}

/// Whether an answer to this prompt begins within thoughts.
#[pyfunction]
fn begins_within_reasoning(name: &str, prompt: &str) -> PyResult<bool> {
    Ok(reasoning_format(name)?.begins_within(prompt))
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyTools>()?;
    module.add_class::<PyTurnReading>()?;
    module.add_class::<PyTurnParser>()?;
    module.add_function(wrap_pyfunction!(tool_call_formats, module)?)?;
    module.add_function(wrap_pyfunction!(reasoning_formats, module)?)?;
    module.add_function(wrap_pyfunction!(find_tool_call_format, module)?)?;
    module.add_function(wrap_pyfunction!(find_reasoning_format, module)?)?;
    module.add_function(wrap_pyfunction!(tool_call_format_facts, module)?)?;
    module.add_function(wrap_pyfunction!(reasoning_markers, module)?)?;
    module.add_function(wrap_pyfunction!(special_reasoning_markers, module)?)?;
    module.add_function(wrap_pyfunction!(begins_within_reasoning, module)?)
}
