//! Rows of a tensor in a file, read by the threads that pack them: some at a time, into memory that stays near the processor.

use std::{
    cell::RefCell,
    fs::File,
    io,
    os::unix::fs::FileExt as _,
    path::Path,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// Rows that are read at once: a panel's.
const ROWS_TOGETHER: usize = 32;

/// Rows of one tensor.
pub(crate) struct FileRows {
    file: File,
    /// Of the first row.
    offset: u64,
    num_rows: usize,
    row_bytes: usize,
    /// Of so many rows the first half and the second lie in turns; 0: they have their order.
    interleaved: usize,
    /// Tells these rows from those of other tensors.
    number: u64,
    failed: Mutex<Option<io::Error>>,
}

/// What a thread has read last.
struct Window {
    number: u64,
    first: usize,
    len: usize,
    bytes: Vec<u8>,
}

thread_local! {
    static WINDOW: RefCell<Window> = const { RefCell::new(Window { number: 0, first: 0, len: 0, bytes: Vec::new() }) };
}

impl FileRows {
    /// # Errors
    ///
    /// The file cannot be opened.
    pub(crate) fn open(
        path: &Path,
        offset: u64,
        (num_rows, row_bytes): (usize, usize),
        interleaved: usize,
    ) -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let file = File::open(path)?;
        // Relaxed: numbers have to differ, and nothing else depends on them.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(Self { file, offset, num_rows, row_bytes, interleaved, number, failed: Mutex::new(None) })
    }

    /// Call `take` with the bytes of a row; not if they cannot be read.
    pub(crate) fn with_row(&self, row: usize, take: &mut dyn FnMut(&[u8])) {
        let place = self.place_of(row);
        WINDOW.with_borrow_mut(|window| {
            let is_there =
                window.number == self.number && (window.first..window.first + window.len).contains(&place);
            if !is_there && let Err(error) = self.fill(window, place) {
                window.number = 0;
                self.fail(error);
                return;
            }
            let start = (place - window.first) * self.row_bytes;
            take(&window.bytes[start..start + self.row_bytes]);
        });
    }

    /// Read bytes that are not looked at: from `place` on, counted from the first row's first.
    pub(crate) fn read_at(&self, place: u64, to: &mut [u8]) {
        if let Err(error) = self.file.read_exact_at(to, self.offset + place) {
            self.fail(error);
        }
    }

    fn fail(&self, error: io::Error) {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }

    /// What went wrong, if anything did.
    ///
    /// # Errors
    ///
    /// The first row that could not be read says why.
    pub(crate) fn finish(&self) -> io::Result<()> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).take().map_or(Ok(()), Err)
    }

    fn fill(&self, window: &mut Window, place: usize) -> io::Result<()> {
        let (first, most) = match self.interleaved {
            0 => (place, ROWS_TOGETHER),
            together => (place / together * together, together),
        };
        let len = most.min(self.num_rows - first);
        window.bytes.resize(len * self.row_bytes, 0);
        self.file.read_exact_at(&mut window.bytes, self.offset + (first * self.row_bytes) as u64)?;
        (window.number, window.first, window.len) = (self.number, first, len);
        Ok(())
    }

    /// Which row of the file a row is.
    fn place_of(&self, row: usize) -> usize {
        let (together, half) = (self.interleaved, self.interleaved / 2);
        if together == 0 {
            return row;
        }
        row / together * together + row % half * 2 + row % together / half
    }
}
