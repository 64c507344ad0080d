//! What was counted, for Python: counters by name, histograms as bounds, counts and sum.

use ::scheduler::MetricsSnapshot;
use pyo3::{prelude::*, types::PyDict};

/// `{"counters": {name: value}, "histograms": {name: (bounds, counts, sum)}}`.
pub(crate) fn metrics_dict<'py>(py: Python<'py>, metrics: &MetricsSnapshot) -> PyResult<Bound<'py, PyDict>> {
    let (counters, histograms) = (PyDict::new(py), PyDict::new(py));
    for (name, value) in &metrics.counters {
        counters.set_item(&**name, value)?;
    }
    for (name, histogram) in &metrics.histograms {
        histograms.set_item(&**name, (&histogram.bounds, &histogram.counts, histogram.sum))?;
    }
    let dict = PyDict::new(py);
    dict.set_item("counters", counters)?;
    dict.set_item("histograms", histograms)?;
    Ok(dict)
}
