//! Packed layers filled from files: the tensors of many layers by all threads at once, each of which reads what it packs.

use std::{collections::HashSet, path::PathBuf};

use ::cpu_kernels::{Filling, LinearError, PackedLinear, fill_together};
use ::gguf::TensorType;
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::{
    cpu::{
        arrays::Rows,
        block_rows::{blocks_filling, check_blocks, row_bytes},
        file_rows::FileRows,
        linear::CpuLinear,
        threads::CpuThreads,
    },
    errors::linear_error,
    gguf::type_named,
};

/// Bytes of a table that are read at once.
const TABLE_PIECE: usize = 1 << 20;

/// Where the rows of a tensor lie in a file: `whole_rows.FileRows` of Python.
#[derive(FromPyObject)]
struct StoredRows {
    file: PathBuf,
    offset: u64,
    row_bytes: usize,
    type_name: String,
    interleaved_rows: usize,
}

/// Rows of a layer: the first one's place, how many, and where they lie.
type LayerRows<'py> = (Bound<'py, CpuLinear>, usize, usize, StoredRows);
/// What could not be done: its place among what was given, and why.
type Failure = (usize, PyErr);

/// A tensor that is packed into rows of a layer.
struct Part {
    /// Its place among what was given.
    place: usize,
    first_row: usize,
    num_rows: usize,
    tensor_type: TensorType,
    rows: FileRows,
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(pack_files, module)?)
}

/// Pack rows of layers, and read tables as they are, out of files; None when all is done.
///
/// What has failed is a place among the layers, then the tables. Layers that have no part in that may be packed or not; rows
/// that could not be read count as packed nevertheless, so no layer of that call may compute.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "Python's lists become vectors")]
fn pack_files<'py>(
    py: Python<'py>,
    threads: &CpuThreads,
    layers: Vec<LayerRows<'py>>,
    tables: Vec<(Bound<'py, PyAny>, StoredRows)>,
) -> PyResult<Option<Failure>> {
    let num_layers = layers.len();
    let mut left = Vec::with_capacity(num_layers);
    for (place, (layer, first_row, num_rows, stored)) in layers.into_iter().enumerate() {
        let part = Part::open(&layer.try_borrow()?.layer, place, (first_row, num_rows), &stored);
        match part {
            Ok(part) => left.push((layer, part)),
            Err(error) => return Ok(Some((place, error))),
        }
    }
    let mut memory = Vec::with_capacity(tables.len());
    for (place, (table, stored)) in tables.iter().enumerate() {
        let table = Rows::<u8>::new("a table", table)?;
        table.expect_contiguous()?;
        table.expect_writable()?;
        match FileRows::open(&stored.file, stored.offset, (1, table.extent()), 0) {
            Ok(rows) => memory.push((num_layers + place, table, rows)),
            Err(error) => return Ok(Some((num_layers + place, error.into()))),
        }
    }
    // Two tensors of one layer may share a panel, which one thread packs: of each layer a round takes one of them.
    while !left.is_empty() || !memory.is_empty() {
        let mut seen = HashSet::new();
        let (now, later) = left.into_iter().partition(|(layer, _)| seen.insert(layer.as_ptr()));
        left = later;
        let failed = pack_round(py, threads, &now, &std::mem::take(&mut memory))?;
        if failed.is_some() {
            return Ok(failed);
        }
    }
    Ok(None)
}

/// Pack one tensor of each layer, and read tables.
fn pack_round<'py>(
    py: Python<'py>,
    threads: &CpuThreads,
    parts: &[(Bound<'py, CpuLinear>, Part)],
    tables: &[(usize, Rows<u8>, FileRows)],
) -> PyResult<Option<Failure>> {
    let mut layers = parts.iter().map(|(layer, _)| layer.try_borrow_mut()).collect::<Result<Vec<_>, _>>()?;
    let mut fillings = Vec::with_capacity(parts.len() + tables.len());
    for ((_, part), layer) in parts.iter().zip(&mut layers) {
        match part.filling(layer.layer_to_fill()?) {
            Ok(filling) => fillings.push(filling),
            Err(error) => return Ok(Some((part.place, linear_error(error)))),
        }
    }
    for (_, table, rows) in tables {
        // SAFETY: it is writable, and stays where it is while the view lives. That no other thread of Python touches it
        // meanwhile is the caller's part, as with every call of numpy and torch.
        let bytes = unsafe { table.as_mut_slice::<u8>() };
        fillings.push(Filling::of_memory(bytes, TABLE_PIECE, |place, to| rows.read_at(place as u64, to)));
    }
    let filled = py.detach(|| fill_together(fillings, &threads.threads));
    // What could not be read is the cause of what could not be packed.
    let read = parts.iter().map(|(_, part)| (part.place, &part.rows));
    let read = read.chain(tables.iter().map(|(place, _, rows)| (*place, rows)));
    for (place, rows) in read {
        if let Err(error) = rows.finish() {
            return Ok(Some((place, error.into())));
        }
    }
    Ok(filled.err().map(|(index, error)| (parts[index].1.place, linear_error(error))))
}

impl Part {
    fn open(
        layer: &PackedLinear,
        place: usize,
        (first_row, num_rows): (usize, usize),
        stored: &StoredRows,
    ) -> PyResult<Self> {
        let tensor_type = type_named(&stored.type_name)?;
        let interleaved = stored.interleaved_rows;
        let are_whole = interleaved == 0 || num_rows.is_multiple_of(interleaved);
        if !interleaved.is_multiple_of(2) || !are_whole {
            return Err(PyValueError::new_err(format!(
                "{num_rows} rows cannot lie in turns, {interleaved} together"
            )));
        }
        check_blocks(layer, tensor_type)?;
        let row_bytes = row_bytes(layer, tensor_type);
        if stored.row_bytes != row_bytes {
            let (found, inputs) = (stored.row_bytes, layer.in_features());
            let message = format!("rows of {found} bytes are given, but {inputs} inputs take {row_bytes}");
            return Err(PyValueError::new_err(message));
        }
        let rows = FileRows::open(&stored.file, stored.offset, (num_rows, row_bytes), interleaved)?;
        Ok(Self { place, first_row, num_rows, tensor_type, rows })
    }

    fn filling<'a>(&'a self, layer: &'a mut PackedLinear) -> Result<Filling<'a>, LinearError> {
        blocks_filling(layer, self.first_row, self.num_rows, self.tensor_type, |row, take| {
            self.rows.with_row(row, take);
        })
    }
}
