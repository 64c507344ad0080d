//! `Trace`: a file of recorded requests, read one at a time.
//!
//! A trace says when a request came, how long its prompt and its answer were and, in Mooncake's format, which prompts
//! begin alike. Token ids are made from that when a request is handed in, so that a trace of any length needs memory for
//! the requests alive at one moment only.

mod azure;
mod mooncake;

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read},
    path::{Path, PathBuf},
    time::Duration,
};

use thiserror::Error;

use crate::KeepGoing;

/// Tokens that one hash id of Mooncake's format stands for.
pub const HASH_BLOCK_TOKENS: u32 = 512;

/// Tokens of a request at most, prompt and answer together: what a scheduler takes.
pub const MAX_REQUEST_TOKENS: u32 = 1 << 26;

/// Bits of a hash id: two token ids of 30 bits carry it.
const HASH_ID_BITS: u32 = 60;
const HALF_MASK: u64 = (1 << (HASH_ID_BITS / 2)) - 1;

/// Tokens with this bit are made-up output; no prompt has it.
const OUTPUT_BIT: i32 = 1 << 30;

/// Bytes of a line at most. The longest request's hash ids take about a megabyte.
const MAX_LINE: u64 = 16 << 20;

/// Lines between two questions whether to go on.
const LINES_PER_CHECK: u64 = 1024;

/// Why a trace cannot be read.
#[derive(Debug, Error)]
pub enum TraceError {
    /// The file cannot be opened or read.
    #[error("cannot read {}: {error}", path.display())]
    Read {
        /// File.
        path: PathBuf,
        /// What the system says.
        error: io::Error,
    },
    /// A directory, a pipe or a device.
    #[error("{} is not a regular file; a trace is read twice, so give a file", path.display())]
    NotAFile {
        /// Given.
        path: PathBuf,
    },
    /// No request in it.
    #[error("{} has no requests; give a trace with at least one", path.display())]
    Empty {
        /// File.
        path: PathBuf,
    },
    /// Neither of the formats.
    #[error(
        "{}: unknown trace format, the first line is {line:?}; Mooncake's is one JSON object per line with timestamp, \
         input_length, output_length and hash_ids, Azure's a CSV with the header {}",
        path.display(),
        azure::HEADER
    )]
    UnknownFormat {
        /// File.
        path: PathBuf,
        /// Its first line, shortened.
        line: String,
    },
    /// A line that is not a record.
    #[error("{}, line {line}: {problem}", path.display())]
    Line {
        /// File.
        path: PathBuf,
        /// From 1.
        line: u64,
        /// What is wrong with it.
        problem: RecordError,
    },
    /// The caller ended it.
    #[error("interrupted")]
    Interrupted,
}

/// What is wrong with one line.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum RecordError {
    /// The line is not of the form.
    #[error("{problem}; {rule}")]
    Form {
        /// What it is.
        problem: String,
        /// What it must be.
        rule: &'static str,
    },
    /// A field is not there.
    #[error("the field {field} is missing; it must be {rule}")]
    MissingField {
        /// Name.
        field: &'static str,
        /// What it must be.
        rule: String,
    },
    /// A field's value is outside its limits.
    #[error("{field} must be {rule}, got {value}")]
    Field {
        /// Name.
        field: &'static str,
        /// What it must be.
        rule: String,
        /// What it is, shortened.
        value: String,
    },
}

/// The formats that are known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TraceFormat {
    /// JSON lines: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`, one per 512 tokens of the prompt.
    Mooncake,
    /// CSV: `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`. Prompts share nothing.
    Azure,
}

impl TraceFormat {
    /// Its name on the command line and in reports.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Mooncake => "mooncake",
            Self::Azure => "azure",
        }
    }

    /// The format of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Mooncake, Self::Azure].into_iter().find(|format| format.as_str() == name)
    }
}

/// What a prompt consists of.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PromptContent {
    /// One id per 512 tokens, the last of which may be partial. Equal ids are equal tokens.
    HashIds(Vec<u64>),
    /// Like no other prompt: the number of the request.
    Unique(u64),
}

/// One recorded request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TraceRequest {
    /// When it came, from the beginning of the trace.
    pub arrival: Duration,
    /// Prompt.
    pub num_prompt_tokens: u32,
    /// Answer.
    pub num_output_tokens: u32,
    /// What the prompt is made of.
    pub content: PromptContent,
}

impl TraceRequest {
    /// The prompt's token ids, made up: tokens at even and odd places of a block are the two halves of its hash id. So
    /// equal ids give equal tokens, and any two tokens side by side tell different ids apart.
    #[must_use]
    pub fn prompt_token_ids(&self) -> Vec<i32> {
        let length = self.num_prompt_tokens as usize;
        let mut tokens = Vec::with_capacity(length);
        match &self.content {
            PromptContent::HashIds(ids) => {
                for &id in ids {
                    let end = (tokens.len() + HASH_BLOCK_TOKENS as usize).min(length);
                    fill(&mut tokens, id, end);
                }
            }
            PromptContent::Unique(number) => fill(&mut tokens, *number, length),
        }
        tokens
    }
}

/// Extend `tokens` to `end` with the two halves of `id`, by turns.
fn fill(tokens: &mut Vec<i32>, id: u64, end: usize) {
    let halves = [(id & HALF_MASK) as i32, (id >> (HASH_ID_BITS / 2) & HALF_MASK) as i32];
    tokens.extend((tokens.len()..end).map(|place| halves[place % 2]));
}

/// The `number`th made-up token of a run: unlike every prompt token, and unlike the last billion of its own kind.
#[must_use]
pub fn output_token_id(number: u64) -> i32 {
    OUTPUT_BIT | (number & HALF_MASK) as i32
}

/// A trace's size, from a first reading.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TraceSummary {
    /// Requests.
    pub num_requests: u64,
    /// Tokens of the longest request, prompt and answer together.
    pub max_request_tokens: u32,
    /// Tokens of all prompts.
    pub num_prompt_tokens: u64,
    /// Tokens of all answers.
    pub num_output_tokens: u64,
    /// When the last request came.
    pub last_arrival: Duration,
}

impl TraceSummary {
    /// Count one more.
    pub fn add(&mut self, request: &TraceRequest) {
        self.num_requests += 1;
        self.max_request_tokens =
            self.max_request_tokens.max(request.num_prompt_tokens + request.num_output_tokens);
        self.num_prompt_tokens += u64::from(request.num_prompt_tokens);
        self.num_output_tokens += u64::from(request.num_output_tokens);
        self.last_arrival = request.arrival;
    }
}

/// A file of recorded requests.
#[derive(Clone, Debug)]
pub struct Trace {
    path: PathBuf,
    format: TraceFormat,
    limit: u64,
}

impl Trace {
    /// Look at a file's first line. `format` is found out when not given; only the first `limit` requests count.
    ///
    /// # Errors
    /// A file that cannot be read, is empty, or looks like no known format.
    pub fn open(path: &Path, format: Option<TraceFormat>, limit: Option<u64>) -> Result<Self, TraceError> {
        let failed = |error| TraceError::Read { path: path.to_owned(), error };
        let file = File::open(path).map_err(failed)?;
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(TraceError::NotAFile { path: path.to_owned() });
        }
        let mut lines = Lines::new(BufReader::new(file), path);
        if !lines.advance()? {
            return Err(TraceError::Empty { path: path.to_owned() });
        }
        let Some(format) = format.or_else(|| guess(&lines.bytes)) else {
            let line = shortened(&String::from_utf8_lossy(&lines.bytes));
            return Err(TraceError::UnknownFormat { path: path.to_owned(), line });
        };
        Ok(Self { path: path.to_owned(), format, limit: limit.unwrap_or(u64::MAX) })
    }

    /// Its format.
    #[must_use]
    pub fn format(&self) -> TraceFormat {
        self.format
    }

    /// Its requests, from the first one on.
    ///
    /// # Errors
    /// A file that cannot be opened any more.
    pub fn requests(
        &self,
    ) -> Result<impl Iterator<Item = Result<TraceRequest, TraceError>> + use<>, TraceError> {
        let failed = |error| TraceError::Read { path: self.path.clone(), error };
        let file = BufReader::new(File::open(&self.path).map_err(failed)?);
        let limit = usize::try_from(self.limit).unwrap_or(usize::MAX);
        Ok(TraceReader::new(file, &self.path, self.format).take(limit))
    }

    /// Read it once, checking every line.
    ///
    /// # Errors
    /// The first line that is wrong; no request at all; `Interrupted` when `keep_going` says so.
    pub fn summarise(&self, keep_going: &mut KeepGoing<'_>) -> Result<TraceSummary, TraceError> {
        let mut summary = TraceSummary::default();
        for request in self.requests()? {
            summary.add(&request?);
            if summary.num_requests.is_multiple_of(LINES_PER_CHECK) && !keep_going() {
                return Err(TraceError::Interrupted);
            }
        }
        if summary.num_requests == 0 {
            return Err(TraceError::Empty { path: self.path.clone() });
        }
        Ok(summary)
    }
}

/// Requests of an open trace, in order. Ends after the first error.
#[derive(Debug)]
pub struct TraceReader<R> {
    lines: Lines<R>,
    format: Format,
    num_read: u64,
    last_arrival: Duration,
    ended: bool,
}

/// What has to be remembered between the lines of a format.
#[derive(Debug)]
enum Format {
    Mooncake,
    /// `None` before the header.
    Azure(Option<azure::Columns>),
}

impl<R: BufRead> TraceReader<R> {
    /// A reader over anything; `path` appears in errors.
    pub fn new(source: R, path: &Path, format: TraceFormat) -> Self {
        let format = match format {
            TraceFormat::Mooncake => Format::Mooncake,
            TraceFormat::Azure => Format::Azure(None),
        };
        Self {
            lines: Lines::new(source, path),
            format,
            num_read: 0,
            last_arrival: Duration::ZERO,
            ended: false,
        }
    }

    fn read(&mut self) -> Result<Option<TraceRequest>, TraceError> {
        loop {
            if !self.lines.advance()? {
                return Ok(None);
            }
            let line = &self.lines.bytes;
            let parsed = match &mut self.format {
                Format::Mooncake => mooncake::parse(line).map(Some),
                Format::Azure(Some(columns)) => columns.parse(line, self.num_read).map(Some),
                Format::Azure(columns) => {
                    azure::Columns::from_header(line).map(|found| *columns = Some(found)).map(|()| None)
                }
            };
            let wrong = |problem| self.lines.wrong(problem);
            let Some(request) = parsed.map_err(wrong)? else { continue };
            if request.arrival < self.last_arrival {
                return Err(wrong(RecordError::Field {
                    field: if matches!(self.format, Format::Mooncake) { "timestamp" } else { "TIMESTAMP" },
                    rule: "no earlier than the line before; sort the trace by time".to_owned(),
                    value: format!("{:?} after {:?} from its beginning", request.arrival, self.last_arrival),
                }));
            }
            self.last_arrival = request.arrival;
            self.num_read += 1;
            return Ok(Some(request));
        }
    }
}

impl<R: BufRead> Iterator for TraceReader<R> {
    type Item = Result<TraceRequest, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let request = self.read().transpose();
        self.ended = !matches!(request, Some(Ok(_)));
        request
    }
}

/// Lines that are not blank, of bounded length.
#[derive(Debug)]
struct Lines<R> {
    source: R,
    path: PathBuf,
    number: u64,
    bytes: Vec<u8>,
}

impl<R: BufRead> Lines<R> {
    fn new(source: R, path: &Path) -> Self {
        Self { source, path: path.to_owned(), number: 0, bytes: Vec::new() }
    }

    /// Put the next line that is not blank into `bytes`, trimmed. `false` at the end.
    fn advance(&mut self) -> Result<bool, TraceError> {
        loop {
            self.bytes.clear();
            let got = self
                .source
                .by_ref()
                .take(MAX_LINE)
                .read_until(b'\n', &mut self.bytes)
                .map_err(|error| TraceError::Read { path: self.path.clone(), error })?;
            if got == 0 {
                return Ok(false);
            }
            self.number += 1;
            if got as u64 == MAX_LINE && self.bytes.last() != Some(&b'\n') {
                return Err(self.wrong(RecordError::Form {
                    problem: format!("the line is longer than {MAX_LINE} bytes"),
                    rule: "a trace has one request per line",
                }));
            }
            if self.number == 1 && self.bytes.starts_with(b"\xef\xbb\xbf") {
                self.bytes.drain(..3); // the mark that some editors put before UTF-8
            }
            let end = self.bytes.trim_ascii_end().len();
            self.bytes.truncate(end);
            if !self.bytes.is_empty() {
                return Ok(true);
            }
        }
    }

    fn wrong(&self, problem: RecordError) -> TraceError {
        TraceError::Line { path: self.path.clone(), line: self.number, problem }
    }
}

/// The format that a first line looks like.
fn guess(line: &[u8]) -> Option<TraceFormat> {
    if line.trim_ascii_start().starts_with(b"{") {
        Some(TraceFormat::Mooncake)
    } else if azure::Columns::from_header(line).is_ok() {
        Some(TraceFormat::Azure)
    } else {
        None
    }
}

/// A value for a message: its first characters.
fn shortened(value: &str) -> String {
    const LONGEST: usize = 60;
    match value.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &value[..end]),
        None => value.to_owned(),
    }
}

/// Lengths that a scheduler could take; `prompt` and `output` are the fields' names.
fn check_lengths(
    (prompt, num_prompt_tokens): (&'static str, u64),
    (output, num_output_tokens): (&'static str, u64),
) -> Result<(u32, u32), RecordError> {
    let longest = u64::from(MAX_REQUEST_TOKENS);
    if num_prompt_tokens == 0 || num_prompt_tokens > longest {
        let rule = format!("a whole number between 1 and {longest}");
        return Err(RecordError::Field { field: prompt, rule, value: num_prompt_tokens.to_string() });
    }
    let left = longest - num_prompt_tokens;
    if num_output_tokens > left {
        let rule = format!("a whole number between 0 and {left}, the prompt having {num_prompt_tokens}");
        return Err(RecordError::Field { field: output, rule, value: num_output_tokens.to_string() });
    }
    Ok((num_prompt_tokens as u32, num_output_tokens as u32))
}
