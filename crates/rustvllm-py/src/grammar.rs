//! `_core.Grammars`: the masks of structured output.

use std::{sync::Arc, time::Duration};

use ::grammar::{Grammars, Verdict, Vocabulary, count_forced, time_masks};
use ::scheduler::{
    COMPLETED_BY_GRAMMAR, CROWDED_OUT_OF_GRAMMARS, REJECTED_BY_GRAMMAR, Scheduler, WITHHELD_SAMPLE,
};
use pyo3::{buffer::PyBuffer, exceptions::PyValueError, prelude::*};

use crate::{
    request::grammar_spec::PyGrammarSpec,
    scheduler::{PyScheduler, buffers::native_buffer, output::PySchedulerOutput},
    text::tokenizer::PyTokenizer,
};

/// The grammars of an engine's requests; belongs to the thread that steps it.
#[pyclass(name = "Grammars", module = "rustvllm._core")]
pub(crate) struct PyGrammars {
    inner: Grammars,
    scheduler: Py<PyScheduler>,
    /// `[samples, words]`, a mask a row.
    bitmask: PyBuffer<i32>,
    places: PyBuffer<i32>,
    depths: PyBuffer<i32>,
    verdicts: PyBuffer<i32>,
    /// The masks of one step, until they are copied out.
    words: Vec<i32>,
    places_of_rows: Vec<i32>,
    depths_of_rows: Vec<i32>,
    verdicts_of_rows: Vec<i32>,
}

#[pymethods]
impl PyGrammars {
    #[new]
    #[pyo3(signature = (scheduler, load_tokenizer, vocab_size, bitmask, columns, *, fast_forward = true))]
    fn new(
        scheduler: Bound<'_, PyScheduler>,
        load_tokenizer: Py<PyAny>,
        vocab_size: u32,
        bitmask: &Bound<'_, PyAny>,
        columns: [Bound<'_, PyAny>; 3],
        fast_forward: bool,
    ) -> PyResult<Self> {
        let load = move || {
            Python::attach(|py| {
                let loaded = load_tokenizer.call0(py).map_err(|error| error.to_string())?;
                let (tokenizer, eos_token_ids): (Py<PyTokenizer>, Vec<u32>) =
                    loaded.extract(py).map_err(|error: PyErr| error.to_string())?;
                Ok((tokenizer.get().inner.clone(), eos_token_ids))
            })
        };
        let vocabulary = Vocabulary::new(Box::new(load), vocab_size);
        let handle = scheduler.try_borrow_mut()?.owned().handle();
        let inner = Grammars::start(handle, vocabulary)?;
        let inner = if fast_forward { inner } else { inner.without_forced_tokens() };
        let bitmask = native_buffer::<i32>(bitmask)?;
        let [places, depths, verdicts] = columns;
        let (places, depths) = (native_buffer::<i32>(&places)?, native_buffer::<i32>(&depths)?);
        let verdicts = native_buffer::<i32>(&verdicts)?;
        let num_rows = places.item_count();
        let fits = bitmask.shape() == [num_rows, inner.num_mask_words()]
            && [&depths, &verdicts].iter().all(|view| view.item_count() == num_rows);
        if !fits
            || [&bitmask, &places, &depths, &verdicts]
                .iter()
                .any(|view| view.readonly() || !view.is_c_contiguous())
        {
            return Err(PyValueError::new_err(format!(
                "bitmask must be a writable int32 array of shape (n, {}), places, depths and verdicts of shape (n,)",
                inner.num_mask_words()
            )));
        }
        let scheduler = scheduler.unbind();
        Ok(Self {
            inner,
            scheduler,
            bitmask,
            places,
            depths,
            verdicts,
            words: Vec::new(),
            places_of_rows: Vec::new(),
            depths_of_rows: Vec::new(),
            verdicts_of_rows: Vec::new(),
        })
    }

    /// Take in which requests with a grammar came and left.
    fn take_news(&mut self, py: Python<'_>) -> PyResult<()> {
        let mut scheduler = self.scheduler.bind(py).try_borrow_mut()?;
        self.inner.take_news(scheduler.owned());
        Ok(())
    }

    /// Append tokens that have to follow, and end requests whose grammars are complete, without the interpreter; before a
    /// step is planned.
    fn look_ahead(&mut self, py: Python<'_>) -> PyResult<()> {
        let Self { inner, scheduler, .. } = self;
        let mut scheduler = scheduler.bind(py).try_borrow_mut()?;
        let scheduler = scheduler.owned();
        // For nothing the interpreter is not given away: the event loop, which was woken by the last step's tokens, would take
        // it, and this thread wait for it.
        if inner.looks_ahead(scheduler) {
            py.detach(|| look_ahead(inner, scheduler));
        }
        Ok(())
    }

    /// Hold requests back whose masks take long and are not there, from steps that are planned from now on; returns whether
    /// one is.
    fn hold_slow(&mut self, py: Python<'_>) -> PyResult<bool> {
        let mut scheduler = self.scheduler.bind(py).try_borrow_mut()?;
        Ok(self.inner.hold_slow(scheduler.owned()))
    }

    /// Let all of them run.
    fn release_slow(&mut self, py: Python<'_>) -> PyResult<()> {
        let mut scheduler = self.scheduler.bind(py).try_borrow_mut()?;
        self.inner.release_slow(scheduler.owned());
        Ok(())
    }

    /// Have the masks of a step computed by other threads, as far as its tokens are known.
    fn begin_masks(&mut self, py: Python<'_>, output: &PySchedulerOutput) -> PyResult<()> {
        let mut scheduler = self.scheduler.bind(py).try_borrow_mut()?;
        self.inner.begin_masks(scheduler.owned(), &output.inner);
        Ok(())
    }

    /// Wait for the masks of a step without the interpreter, for so many nanoseconds or, if their tokens have just come,
    /// a little longer; True once they are there.
    fn wait_for_masks(
        &mut self,
        py: Python<'_>,
        output: &PySchedulerOutput,
        limit_ns: u64,
    ) -> PyResult<bool> {
        let Self { inner, scheduler, .. } = self;
        let mut scheduler = scheduler.bind(py).try_borrow_mut()?;
        let (scheduler, output) = (scheduler.owned(), output.inner);
        Ok(py.detach(|| wait_for_masks(inner, scheduler, &output, limit_ns)))
    }

    /// Write the masks of a step into the registered arrays, without the interpreter, and withhold the samples whose masks
    /// are not there; returns of how many rows of logits something is to be said.
    fn take_masks(&mut self, py: Python<'_>, output: &PySchedulerOutput) -> PyResult<usize> {
        let Self { inner, scheduler, words, places_of_rows, depths_of_rows, verdicts_of_rows, .. } = self;
        let mut scheduler = scheduler.bind(py).try_borrow_mut()?;
        let (scheduler, output) = (scheduler.owned(), output.inner);
        let columns = [places_of_rows, depths_of_rows, verdicts_of_rows];
        py.detach(|| collect_masks(inner, scheduler, &output, words, columns));
        write_start(&mut self.bitmask, &self.words)?;
        write_start(&mut self.places, &self.places_of_rows)?;
        write_start(&mut self.depths, &self.depths_of_rows)?;
        write_start(&mut self.verdicts, &self.verdicts_of_rows)?;
        Ok(self.places_of_rows.len())
    }
}

fn look_ahead(grammars: &mut Grammars, scheduler: &mut Scheduler) {
    grammars.look_ahead(scheduler);
}

/// The scheduler has one owner: what other threads get of it is the whole of it.
fn wait_for_masks(
    grammars: &mut Grammars,
    scheduler: &mut Scheduler,
    output: &::scheduler::SchedulerOutput,
    limit_ns: u64,
) -> bool {
    grammars.wait_for_masks(scheduler, output, Duration::from_nanos(limit_ns))
}

fn collect_masks(
    grammars: &mut Grammars,
    scheduler: &mut Scheduler,
    output: &::scheduler::SchedulerOutput,
    words: &mut Vec<i32>,
    [places, depths, verdicts]: [&mut Vec<i32>; 3],
) {
    words.clear();
    places.clear();
    depths.clear();
    verdicts.clear();
    let num_words = grammars.num_mask_words();
    grammars.take_masks(scheduler, output, |place, depth, verdict, mask| {
        words.extend(mask.iter().map(|&word| word as i32));
        words.resize((places.len() + 1) * num_words, 0);
        places.push(place as i32);
        depths.push(depth as i32);
        verdicts.push(match verdict {
            Verdict::Masked | Verdict::Free => 0,
            Verdict::Complete => COMPLETED_BY_GRAMMAR,
            Verdict::Rejected => REJECTED_BY_GRAMMAR,
            Verdict::Late => WITHHELD_SAMPLE,
            Verdict::CrowdedOut => CROWDED_OUT_OF_GRAMMARS,
        });
    });
}

/// Copy numbers to the start of an array.
fn write_start(array: &mut PyBuffer<i32>, values: &[i32]) -> PyResult<()> {
    if values.len() > array.item_count() {
        return Err(PyValueError::new_err("more samples obey grammars than there are rows for masks"));
    }
    // SAFETY: the view is writable and C-contiguous (checked where it was registered), keeps its memory in place, and has
    // room for the values; the interpreter is held, so no other thread of Python writes there.
    unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), array.buf_ptr().cast::<i32>(), values.len()) };
    Ok(())
}

/// A vocabulary on which grammars are measured.
#[pyclass(frozen, name = "MaskTimer", module = "rustvllm._core")]
struct PyMaskTimer {
    vocabulary: Vocabulary,
    tokenizer: Arc<::output::Tokenizer>,
}

#[pymethods]
impl PyMaskTimer {
    #[new]
    fn new(tokenizer: &PyTokenizer, eos_token_ids: Vec<u32>, vocab_size: u32) -> Self {
        let tokenizer = tokenizer.inner.clone();
        let own = tokenizer.clone();
        let load = move || Ok((own.clone(), eos_token_ids.clone()));
        Self { vocabulary: Vocabulary::new(Box::new(load), vocab_size), tokenizer }
    }

    /// Of a text: its tokens, those that a grammar forces, how many rows of these there are, and whether the text was taken.
    fn forced(
        &self,
        py: Python<'_>,
        spec: &PyGrammarSpec,
        text: &str,
    ) -> PyResult<(usize, usize, usize, bool)> {
        let spec = spec.shared();
        let encode = |rest: &str| self.tokenizer.encode(rest, false).unwrap_or_default();
        let share = py.detach(|| count_forced(&self.vocabulary, &spec, text, encode));
        let share = share.map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok((share.num_tokens, share.num_forced, share.num_runs, share.is_taken))
    }

    /// Microseconds to compile a grammar, those of each mask along a text for the first request and for the second one, and
    /// whether the text was taken.
    fn time(
        &self,
        py: Python<'_>,
        spec: &PyGrammarSpec,
        token_ids: Vec<u32>,
    ) -> PyResult<(f64, Vec<f64>, Vec<f64>, bool)> {
        let spec = spec.shared();
        let times = py.detach(|| time_masks(&self.vocabulary, &spec, &token_ids));
        let times = times.map_err(|error| PyValueError::new_err(error.to_string()))?;
        let microseconds = |time: std::time::Duration| time.as_nanos() as f64 / 1000.0;
        let masks = times.masks.into_iter().map(microseconds).collect();
        let again = times.masks_again.into_iter().map(microseconds).collect();
        Ok((microseconds(times.compile), masks, again, times.is_taken))
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyMaskTimer>()?;
    module.add_class::<PyGrammars>()
}
