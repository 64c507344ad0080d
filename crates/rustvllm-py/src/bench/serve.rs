//! `loadgen::http_load` for `rustvllm bench serve`.

use std::{path::PathBuf, time::Duration};

use loadgen::{
    HttpLoadError, HttpLoadOptions, Trace, TraceFormat,
    http_load::{self, Distribution, Goodput, Prompts, RandomPrompts, Rate, Record, TextPrompt, Vocabulary},
};
use pyo3::{
    exceptions::{PyConnectionError, PyValueError},
    prelude::*,
    types::PyDict,
};

use crate::errors::TraceError;

fn load_error(error: &HttpLoadError) -> PyErr {
    match error {
        HttpLoadError::Trace(error) => TraceError::new_err(error.to_string()),
        HttpLoadError::Unreachable { .. } | HttpLoadError::Models { .. } | HttpLoadError::Warmup { .. } => {
            PyConnectionError::new_err(error.to_string())
        }
        _ => PyValueError::new_err(error.to_string()),
    }
}

/// The numbers of `RandomPrompts`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct RandomArguments {
    input_len: u32,
    output_len: u32,
    range_ratio: f64,
    prefix_len: u32,
    num_prefixes: u32,
}

/// Prompts, from the one data set that is given.
fn prompts(
    vocab_size: Option<u32>,
    random: Option<RandomArguments>,
    texts: Option<Vec<(String, u32)>>,
    trace: Option<PathBuf>,
) -> PyResult<Prompts> {
    let vocabulary = vocab_size.map_or(Vocabulary::Words, Vocabulary::Ids);
    match (random, texts, trace) {
        (Some(random), None, None) => Ok(Prompts::Random(RandomPrompts {
            vocabulary,
            input_len: random.input_len,
            output_len: random.output_len,
            range_ratio: random.range_ratio,
            prefix_len: random.prefix_len,
            num_prefixes: random.num_prefixes,
        })),
        (None, Some(texts), None) => Ok(Prompts::Texts(
            texts.into_iter().map(|(text, output_len)| TextPrompt { text, output_len }).collect(),
        )),
        (None, None, Some(path)) => {
            let trace = Trace::open(&path, None::<TraceFormat>, None)
                .map_err(|error| TraceError::new_err(error.to_string()))?;
            Ok(Prompts::Trace(trace, vocabulary))
        }
        _ => Err(PyValueError::new_err("give exactly one of random, texts and trace")),
    }
}

#[pyfunction]
#[pyo3(signature = (base_url, endpoint, fields, *, num_prompts, random=None, texts=None, trace=None, vocab_size=None,
    request_rate=None, burstiness=1.0, as_recorded=false, max_concurrency=None, num_warmups=0, seed=0, timeout_s=3600.0,
    percentiles=vec![99.0], goodput_ttft_ms=None, goodput_tpot_ms=None, goodput_e2el_ms=None, api_key=None,
    progress=None, detailed=false))]
#[expect(clippy::too_many_arguments, reason = "keyword-only in Python")]
fn bench_serve(
    py: Python<'_>,
    base_url: String,
    endpoint: String,
    fields: String,
    num_prompts: usize,
    random: Option<RandomArguments>,
    texts: Option<Vec<(String, u32)>>,
    trace: Option<PathBuf>,
    vocab_size: Option<u32>,
    request_rate: Option<f64>,
    burstiness: f64,
    as_recorded: bool,
    max_concurrency: Option<usize>,
    num_warmups: usize,
    seed: u64,
    timeout_s: f64,
    percentiles: Vec<f64>,
    goodput_ttft_ms: Option<f64>,
    goodput_tpot_ms: Option<f64>,
    goodput_e2el_ms: Option<f64>,
    api_key: Option<String>,
    progress: Option<Py<PyAny>>,
    detailed: bool,
) -> PyResult<Bound<'_, PyDict>> {
    let timeout = Duration::try_from_secs_f64(timeout_s)
        .map_err(|error| PyValueError::new_err(format!("timeout_s is {timeout_s}: {error}")))?;
    let rate = match request_rate {
        Some(rate) => Rate::PerSecond { rate, burstiness },
        None if as_recorded => Rate::Recorded,
        None => Rate::Unlimited,
    };
    let options = HttpLoadOptions {
        base_url,
        endpoint,
        fields,
        api_key,
        num_requests: num_prompts,
        num_warmups,
        max_concurrency,
        rate,
        seed,
        timeout,
        percentiles,
        goodput: Goodput { ttft_ms: goodput_ttft_ms, tpot_ms: goodput_tpot_ms, e2el_ms: goodput_e2el_ms },
    };
    let prompts = prompts(vocab_size, random, texts, trace)?;
    let mut raised = None;
    let result = py.detach(|| {
        loadgen::http_load(&options, &prompts, &mut |counts| {
            let looked = Python::attach(|py| {
                py.check_signals()?;
                if let Some(progress) = &progress {
                    progress.call1(py, (counts.completed, counts.failed, counts.events, counts.is_warmup))?;
                }
                Ok(())
            });
            looked.map_err(|error| raised = Some(error)).is_ok()
        })
    });
    if let Some(error) = raised {
        return Err(error);
    }
    let report = result.map_err(|error| load_error(&error))?;
    let dict = PyDict::new(py);
    dict.set_item("completed", report.completed)?;
    dict.set_item("failed", report.failed())?;
    let failures: Vec<_> =
        report.failures.iter().map(|(kind, failure)| (kind, failure.count, &failure.first)).collect();
    dict.set_item("failures", failures)?;
    dict.set_item("duration", report.duration.as_secs_f64())?;
    dict.set_item("total_input_tokens", report.input_tokens)?;
    dict.set_item("total_output_tokens", report.output_tokens)?;
    dict.set_item("requests_of_unknown_input", report.requests_of_unknown_input)?;
    dict.set_item("requests_without_usage", report.requests_without_usage)?;
    dict.set_item("good", report.good)?;
    dict.set_item("content_events", report.events)?;
    dict.set_item("max_concurrent_requests", report.max_concurrent_requests)?;
    dict.set_item("bytes_received", report.bytes_received)?;
    dict.set_item("client_cpu_s", report.client_cpu.as_secs_f64())?;
    let distributions = [
        ("ttft", &report.ttft_ms),
        ("tpot", &report.tpot_ms),
        ("itl", &report.itl_ms),
        ("e2el", &report.e2el_ms),
        ("events_per_stream", &report.events_per_request),
    ];
    for (name, distribution) in distributions {
        dict.set_item(name, as_dict(py, distribution)?)?;
    }
    if detailed {
        let requests: Vec<_> =
            report.records.iter().map(|record| request_as_dict(py, record)).collect::<PyResult<_>>()?;
        dict.set_item("requests", requests)?;
    }
    Ok(dict)
}

/// One request; of one that failed, no times and tokens but when it was sent.
fn request_as_dict<'py>(py: Python<'py>, record: &Record) -> PyResult<Bound<'py, PyDict>> {
    let is_whole = record.failure.is_none();
    let gaps = if is_whole { record.gaps_ns.as_slice() } else { &[] };
    let dict = PyDict::new(py);
    dict.set_item("sent", record.sent.as_secs_f64())?;
    dict.set_item("input_tokens", record.num_prompt_tokens)?;
    dict.set_item("output_tokens", if is_whole { record.output_tokens() } else { 0 })?;
    dict.set_item("ttft", if is_whole { record.first_token.as_secs_f64() } else { 0.0 })?;
    dict.set_item("itl", gaps.iter().map(|&gap| gap as f64 / 1e9).collect::<Vec<_>>())?;
    dict.set_item("error", record.failure.as_ref().map_or_else(String::new, ToString::to_string))?;
    Ok(dict)
}

fn as_dict<'py>(py: Python<'py>, distribution: &Distribution) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("count", distribution.count)?;
    dict.set_item("mean", distribution.mean)?;
    dict.set_item("median", distribution.median)?;
    dict.set_item("std", distribution.std)?;
    dict.set_item("min", distribution.min)?;
    dict.set_item("max", distribution.max)?;
    dict.set_item("percentiles", &distribution.percentiles)?;
    Ok(dict)
}

#[pyfunction]
#[pyo3(signature = (base_url, *, api_key=None))]
fn served_model(py: Python<'_>, base_url: &str, api_key: Option<&str>) -> PyResult<String> {
    py.detach(|| http_load::served_model(base_url, api_key)).map_err(|error| load_error(&error))
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(bench_serve, module)?)?;
    module.add_function(wrap_pyfunction!(served_model, module)?)
}
