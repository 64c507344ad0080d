//! A model's file, or the files that it was split into.

use std::{
    collections::HashSet,
    fs::File,
    io::BufReader,
    path::{Path, PathBuf},
};

use crate::{
    error::GgufError,
    header::{Header, TensorInfo, parse},
    value::Value,
};

/// The most files of a model.
const MAX_PARTS: u64 = 1024;

/// A tensor, and which file it lies in.
#[derive(Debug)]
pub struct Tensor<'a> {
    /// Index into [`GgufFile::paths`].
    pub file: usize,
    /// Where and what.
    pub info: &'a TensorInfo,
}

/// The headers of a model's files.
#[derive(Debug)]
pub struct GgufFile {
    paths: Vec<PathBuf>,
    headers: Vec<Header>,
}

impl GgufFile {
    /// Reads the header of a file, and those of the others if it is the first of several.
    ///
    /// # Errors
    ///
    /// Anything that is wrong with one of them, a file that is missing, or a later file than the first.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let first = read_header(path)?;
        let count = number(&first, "split.count").unwrap_or(1).max(1);
        if count > MAX_PARTS {
            return Err(GgufError::Count { what: "split.count".to_owned(), count, most: MAX_PARTS });
        }
        let mut file = Self { paths: vec![path.to_owned()], headers: vec![first] };
        if count > 1 {
            file.open_others(count)?;
        }
        Ok(file)
    }

    fn open_others(&mut self, count: u64) -> Result<(), GgufError> {
        let path = &self.paths[0];
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let part = number(&self.headers[0], "split.no").unwrap_or(0).saturating_add(1);
        let Some(stem) = name.strip_suffix(&ending(part, count)) else {
            return Err(GgufError::PartName { count });
        };
        if part != 1 {
            let first = format!("{stem}{}", ending(1, count));
            return Err(GgufError::NotTheFirst { part, count, first });
        }
        let paths: Vec<_> =
            (2..=count).map(|part| path.with_file_name(format!("{stem}{}", ending(part, count)))).collect();
        // Before any of them is read: what is missing is the likelier fault.
        if let Some(path) = paths.iter().find(|path| !path.is_file()) {
            return Err(GgufError::PartMissing { path: path.clone(), count });
        }
        for (path, expected_part) in paths.into_iter().zip(2..) {
            let header = read_header(&path)
                .map_err(|source| GgufError::Part { path: path.clone(), source: Box::new(source) })?;
            let said = (number(&header, "split.no"), number(&header, "split.count"));
            if said != (Some(expected_part - 1), Some(count)) {
                let (part, said_count) =
                    (said.0.map_or(0, |part| part.saturating_add(1)), said.1.unwrap_or(0));
                let expected_count = count;
                return Err(GgufError::PartMixed {
                    path,
                    part,
                    count: said_count,
                    expected_part,
                    expected_count,
                });
            }
            self.paths.push(path);
            self.headers.push(header);
        }
        self.check_together()
    }

    fn check_together(&self) -> Result<(), GgufError> {
        let mut names = HashSet::new();
        for tensor in self.tensors() {
            if !names.insert(&tensor.info.name) {
                return Err(GgufError::Duplicate { kind: "tensor", name: tensor.info.name.clone() });
            }
        }
        let found = names.len() as u64;
        match number(&self.headers[0], "split.tensors.count") {
            Some(expected) if expected != found => Err(GgufError::PartTensors { expected, found }),
            _ => Ok(()),
        }
    }

    /// The files, the first one first.
    #[must_use]
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// What the first file says; the others repeat none of it.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.headers[0]
    }

    /// All tensors, file by file.
    pub fn tensors(&self) -> impl Iterator<Item = Tensor<'_>> {
        let headers = self.headers.iter().enumerate();
        headers.flat_map(|(file, header)| header.tensors.iter().map(move |info| Tensor { file, info }))
    }
}

fn ending(part: u64, count: u64) -> String {
    format!("-{part:05}-of-{count:05}.gguf")
}

fn number(header: &Header, key: &str) -> Option<u64> {
    header.get(key).and_then(Value::as_u64)
}

fn read_header(path: &Path) -> Result<Header, GgufError> {
    let file = File::open(path)?;
    let size = file.metadata()?.len();
    parse(BufReader::with_capacity(1 << 16, file), size)
}
