//! `SamplingExtras`: the parameters of a request that are lists of token ids, and what its logits processors are given.
//! Which lists there are is one table, `SAMPLING_LISTS`.
//!
//! A row says all that the core needs to know of a list: its name, its kind and its limit. How lists go from the
//! front end to the core, between processes and to the worker follows from the kind. The scheduler carries them and
//! looks at none; the worker fetches them once, when the request gets a row; few requests have any.
//! `docs/adding-a-sampling-parameter.md` adds a row.

use std::{any::Any, fmt, sync::Arc};

use thiserror::Error;

/// Most bytes that the lists of one request may take together.
pub const MAX_SAMPLING_EXTRAS_BYTES: usize = 3 << 20;

/// Most entries of a list that has an entry for a token id: more than any vocabulary has.
const MAX_LISTED_TOKENS: usize = 1 << 19;

/// Most tokens whose log-probabilities a request may get at each place of its output, as in vLLM.
const MAX_LOGPROB_TOKEN_IDS: usize = 128;

/// Most token ids of a word.
pub const MAX_WORD_TOKENS: usize = 128;

/// What a list holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ListKind {
    /// Token ids.
    Ids,
    /// Token ids, each with a number; callers give a mapping.
    Biases,
    /// Sequences of 1 to `MAX_WORD_TOKENS` token ids; callers give texts.
    Words,
}

impl ListKind {
    /// Its name in Python.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ids => "ids",
            Self::Biases => "biases",
            Self::Words => "words",
        }
    }
}

/// A row of the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SamplingList {
    /// Keyword, and the name that callers use.
    pub name: &'static str,
    /// What it means.
    pub description: &'static str,
    /// What it holds.
    pub kind: ListKind,
    /// Most entries.
    pub max_entries: usize,
}

macro_rules! sampling_lists {
    ($(#[doc = $doc:literal] $name:ident: $kind:ident, $max_entries:expr;)+) => {
        /// How many rows there are.
        pub const NUM_LISTS: usize = [$(stringify!($name)),+].len();

        /// The table. Its order is the order of the lists on the wire.
        pub const SAMPLING_LISTS: [SamplingList; NUM_LISTS] = [
            $(SamplingList {
                name: stringify!($name),
                description: $doc,
                kind: ListKind::$kind,
                max_entries: $max_entries,
            },)+
        ];
    };
}

sampling_lists! {
    /// Token id (as a string) to a number that is added to its logit, clamped to [-100, 100].
    logit_bias: Biases, MAX_LISTED_TOKENS;
    /// Sample nothing else.
    allowed_token_ids: Ids, MAX_LISTED_TOKENS;
    /// Words that are not generated.
    bad_words: Words, 4096;
    /// Show log-probabilities of these tokens at each place, in addition to its own; needs `logprobs`.
    logprob_token_ids: Ids, MAX_LOGPROB_TOKEN_IDS;
}

/// A list of a request.
#[derive(Clone, PartialEq, Debug)]
pub enum TokenList {
    /// Token ids.
    Ids(Vec<i32>),
    /// Token ids, each with a number.
    Biases(Vec<(i32, f32)>),
    /// Sequences of token ids.
    Words(Vec<Vec<i32>>),
}

impl TokenList {
    /// One without entries.
    #[must_use]
    pub fn empty(kind: ListKind) -> Self {
        match kind {
            ListKind::Ids => Self::Ids(Vec::new()),
            ListKind::Biases => Self::Biases(Vec::new()),
            ListKind::Words => Self::Words(Vec::new()),
        }
    }

    /// What it holds.
    #[must_use]
    pub fn kind(&self) -> ListKind {
        match self {
            Self::Ids(_) => ListKind::Ids,
            Self::Biases(_) => ListKind::Biases,
            Self::Words(_) => ListKind::Words,
        }
    }

    /// Its token ids, those of all words one after the other.
    pub fn token_ids(&self) -> impl Iterator<Item = i32> {
        let (ids, biases, words): (&[_], &[_], &[_]) = match self {
            Self::Ids(ids) => (ids, &[], &[]),
            Self::Biases(biases) => (&[], biases, &[]),
            Self::Words(words) => (&[], &[], words),
        };
        let bias_ids = biases.iter().map(|(token_id, _): &(i32, f32)| token_id);
        ids.iter().chain(bias_ids).chain(words.iter().flatten()).copied()
    }

    fn num_entries(&self) -> usize {
        match self {
            Self::Ids(ids) => ids.len(),
            Self::Biases(biases) => biases.len(),
            Self::Words(words) => words.len(),
        }
    }

    fn num_bytes(&self) -> usize {
        match self {
            Self::Ids(ids) => size_of_val(&**ids),
            Self::Biases(biases) => size_of_val(&**biases),
            Self::Words(words) => words.iter().map(|word| size_of_val(&**word)).sum(),
        }
    }

    /// # Errors
    /// The first thing that is wrong with it as the list of this row.
    fn check(&self, row: &SamplingList) -> Result<(), SamplingExtrasError> {
        let parameter = row.name;
        if self.kind() != row.kind {
            return Err(SamplingExtrasError::WrongKind { parameter, expected: row.kind, got: self.kind() });
        }
        if self.num_entries() > row.max_entries {
            let (got, limit) = (self.num_entries(), row.max_entries);
            // A text may be several sequences.
            let entries = if row.kind == ListKind::Words { "sequences of tokens" } else { "entries" };
            return Err(SamplingExtrasError::TooManyEntries { parameter, entries, got, limit });
        }
        match self {
            Self::Biases(biases) => {
                if let Some(&(token_id, bias)) = biases.iter().find(|(_, bias)| !bias.is_finite()) {
                    return Err(SamplingExtrasError::NotFinite { parameter, token_id, bias });
                }
            }
            Self::Words(words) => {
                let is_wrong = |word: &&Vec<i32>| word.is_empty() || word.len() > MAX_WORD_TOKENS;
                if let Some(word) = words.iter().find(is_wrong) {
                    return Err(SamplingExtrasError::WordLength { parameter, got: word.len() });
                }
            }
            Self::Ids(_) => {}
        }
        match self.token_ids().find(|&token_id| token_id < 0) {
            Some(token_id) => Err(SamplingExtrasError::NegativeTokenId { parameter, token_id }),
            None => Ok(()),
        }
    }
}

/// Tokens whose log-probabilities are asked for at places of a prompt: a row of ids for each place.
#[derive(Clone, PartialEq, Debug)]
pub struct PromptTokens {
    /// The place whose logits the first row is about; they judge the token behind it.
    pub start: u32,
    /// Whether the request asks for nothing else of its prompt, so that nothing before `start` is judged.
    pub is_alone: bool,
    /// Ids per row.
    pub width: u32,
    /// Row after row; −1 where a row has fewer.
    pub ids: Box<[i32]>,
}

impl PromptTokens {
    /// The parameter that they come from.
    pub const NAME: &'static str = "prompt_logprob_token_ids";

    fn check(&self) -> Result<(), SamplingExtrasError> {
        let parameter = Self::NAME;
        if self.ids.is_empty() || !self.ids.len().is_multiple_of(self.width as usize) {
            let (got, width) = (self.ids.len(), self.width);
            return Err(SamplingExtrasError::NoRows { parameter, got, width });
        }
        match self.ids.iter().find(|&&token_id| token_id < -1) {
            Some(&token_id) => Err(SamplingExtrasError::NegativeTokenId { parameter, token_id }),
            None => Ok(()),
        }
    }
}

/// Why lists are refused. Each names the parameter that is wrong.
#[derive(Clone, PartialEq, Debug, Error)]
pub enum SamplingExtrasError {
    /// A name that the table does not have.
    #[error("{name} is not a list of SAMPLING_LISTS, which has {}", list_names())]
    UnknownList {
        /// The name.
        name: String,
    },
    /// A list of another kind than its row says.
    #[error("{parameter} must hold {}, got {}", expected.as_str(), got.as_str())]
    WrongKind {
        /// The parameter's name.
        parameter: &'static str,
        /// The row's kind.
        expected: ListKind,
        /// The list's kind.
        got: ListKind,
    },
    /// A token id below zero.
    #[error("{parameter} holds the token id {token_id}, but ids are not negative")]
    NegativeTokenId {
        /// The parameter's name.
        parameter: &'static str,
        /// The id.
        token_id: i32,
    },
    /// Ids that are not whole rows.
    #[error("{parameter} holds {got} ids, which are not rows of {width}")]
    NoRows {
        /// The parameter's name.
        parameter: &'static str,
        /// How many ids.
        got: usize,
        /// Ids per row.
        width: u32,
    },
    /// A bias that cannot be added.
    #[error("{parameter} of token id {token_id} is {bias}, but it must be finite")]
    NotFinite {
        /// The parameter's name.
        parameter: &'static str,
        /// The id that has the bias.
        token_id: i32,
        /// The bias.
        bias: f32,
    },
    /// A word of no tokens, or of too many.
    #[error("a word of {parameter} has {got} tokens, but it must have 1 to {MAX_WORD_TOKENS}")]
    WordLength {
        /// The parameter's name.
        parameter: &'static str,
        /// Tokens of the word.
        got: usize,
    },
    /// More entries than the row allows.
    #[error("{parameter} has {got} {entries}; the limit is {limit}")]
    TooManyEntries {
        /// The parameter's name.
        parameter: &'static str,
        /// What an entry is.
        entries: &'static str,
        /// Entries of the list.
        got: usize,
        /// The row's limit.
        limit: usize,
    },
    /// More bytes than all lists may take.
    #[error(
        "{}, {} and extra_args take {got} bytes together; the limit is {MAX_SAMPLING_EXTRAS_BYTES}",
        list_names(),
        PromptTokens::NAME
    )]
    TooLarge {
        /// The largest of them.
        parameter: &'static str,
        /// Bytes of all.
        got: usize,
    },
}

impl SamplingExtrasError {
    /// The parameter that is wrong; none if the table does not have it.
    #[must_use]
    pub fn parameter(&self) -> Option<&'static str> {
        match self {
            Self::UnknownList { .. } => None,
            Self::WrongKind { parameter, .. }
            | Self::NegativeTokenId { parameter, .. }
            | Self::NoRows { parameter, .. }
            | Self::NotFinite { parameter, .. }
            | Self::WordLength { parameter, .. }
            | Self::TooManyEntries { parameter, .. }
            | Self::TooLarge { parameter, .. } => Some(parameter),
        }
    }
}

/// Something that the worker understands and that cannot leave the process: Python's callables.
#[derive(Clone)]
pub struct Attachment(pub Arc<dyn Any + Send + Sync>);

impl fmt::Debug for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Attachment")
    }
}

impl PartialEq for Attachment {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// See the module docs.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingExtras {
    /// In the order of the table; each of the kind that its row says.
    lists: [TokenList; NUM_LISTS],
    prompt_tokens: Option<PromptTokens>,
    arguments: Option<Box<str>>,
    attachment: Option<Attachment>,
}

impl Default for SamplingExtras {
    fn default() -> Self {
        Self {
            lists: SAMPLING_LISTS.map(|row| TokenList::empty(row.kind)),
            prompt_tokens: None,
            arguments: None,
            attachment: None,
        }
    }
}

impl SamplingExtras {
    /// Checked lists by their names; one that is not given is empty, and of one that is given twice the last counts.
    /// The core does not know the vocabulary: the front end checks that the ids are in it, and the worker does once
    /// more.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn new<'a>(
        named: impl IntoIterator<Item = (&'a str, TokenList)>,
        arguments: Option<String>,
    ) -> Result<Self, SamplingExtrasError> {
        let mut extras = Self { arguments: arguments.map(Into::into), ..Self::default() };
        for (name, list) in named {
            let Some(place) = place_of(name) else {
                return Err(SamplingExtrasError::UnknownList { name: name.to_owned() });
            };
            list.check(&SAMPLING_LISTS[place])?;
            extras.lists[place] = list;
        }
        extras.check_size()?;
        Ok(extras)
    }

    /// These lists with tokens for the places of the prompt.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn with_prompt_tokens(self, prompt_tokens: PromptTokens) -> Result<Self, SamplingExtrasError> {
        prompt_tokens.check()?;
        let extras = Self { prompt_tokens: Some(prompt_tokens), ..self };
        extras.check_size()?;
        Ok(extras)
    }

    fn check_size(&self) -> Result<(), SamplingExtrasError> {
        let lists = self.lists().map(|(row, list)| (list.num_bytes(), row.name));
        let of_prompt = self.prompt_tokens().map_or(0, |tokens| size_of_val(&*tokens.ids));
        let arguments = (self.arguments().map_or(0, str::len), "extra_args");
        let sizes: Vec<(usize, &str)> = lists.chain([(of_prompt, PromptTokens::NAME), arguments]).collect();
        let got = sizes.iter().map(|(bytes, _)| bytes).sum();
        if got > MAX_SAMPLING_EXTRAS_BYTES {
            let parameter = sizes.into_iter().max().map_or("extra_args", |(_, name)| name);
            return Err(SamplingExtrasError::TooLarge { parameter, got });
        }
        Ok(())
    }

    /// These lists with something that stays in this process.
    #[must_use]
    pub fn with_attachment(self, attachment: Option<Attachment>) -> Self {
        Self { attachment, ..self }
    }

    /// All lists with their rows, in the order of the table.
    pub fn lists(&self) -> impl Iterator<Item = (&'static SamplingList, &TokenList)> + Clone {
        const ROWS: &[SamplingList; NUM_LISTS] = &SAMPLING_LISTS;
        ROWS.iter().zip(&self.lists)
    }

    /// The list of this name; `None` when the table has no such row.
    #[must_use]
    pub fn list(&self, name: &str) -> Option<&TokenList> {
        place_of(name).map(|place| &self.lists[place])
    }

    /// Tokens that are asked for at places of the prompt.
    #[must_use]
    pub fn prompt_tokens(&self) -> Option<&PromptTokens> {
        self.prompt_tokens.as_ref()
    }

    /// A JSON object for logits processors.
    #[must_use]
    pub fn arguments(&self) -> Option<&str> {
        self.arguments.as_deref()
    }

    /// What cannot leave the process.
    #[must_use]
    pub fn attachment(&self) -> Option<&Attachment> {
        self.attachment.as_ref()
    }
}

fn place_of(name: &str) -> Option<usize> {
    SAMPLING_LISTS.iter().position(|row| row.name == name)
}

fn list_names() -> String {
    SAMPLING_LISTS.map(|row| row.name).join(", ")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{
        Attachment, MAX_LISTED_TOKENS, MAX_SAMPLING_EXTRAS_BYTES, MAX_WORD_TOKENS, NUM_LISTS, PromptTokens,
        SAMPLING_LISTS, SamplingExtras, SamplingExtrasError, TokenList,
    };

    fn one(name: &str, list: TokenList) -> Result<SamplingExtras, SamplingExtrasError> {
        SamplingExtras::new([(name, list)], None)
    }

    #[test]
    fn a_wrong_list_is_named_with_its_value() {
        let bias = |token_id, bias| ("logit_bias", TokenList::Biases(vec![(token_id, bias)]));
        let words = |words: Vec<Vec<i32>>| ("bad_words", TokenList::Words(words));
        let ids = |ids| ("allowed_token_ids", TokenList::Ids(ids));
        let wrong: Vec<((&str, TokenList), &str)> = vec![
            (bias(-1, 0.0), "logit_bias holds the token id -1"),
            (bias(3, f32::NAN), "logit_bias of token id 3 is NaN"),
            (bias(3, f32::INFINITY), "token id 3 is inf"),
            (ids(vec![4, -2]), "allowed_token_ids holds the token id -2"),
            (
                ids(vec![0; MAX_LISTED_TOKENS + 1]),
                "allowed_token_ids has 524289 entries; the limit is 524288",
            ),
            (words(vec![vec![1], vec![2, -7]]), "bad_words holds the token id -7"),
            (words(vec![vec![]]), "bad_words has 0 tokens"),
            (words(vec![vec![1; MAX_WORD_TOKENS + 1]]), "has 129 tokens"),
            (words(vec![vec![1]; 4097]), "bad_words has 4097 sequences of tokens; the limit is 4096"),
            (("bad_words", TokenList::Ids(vec![])), "bad_words must hold words, got ids"),
        ];
        for ((name, list), expected) in wrong {
            let error = one(name, list).expect_err(expected);
            assert!(error.to_string().contains(expected), "{error}");
            assert_eq!(error.parameter(), Some(name));
        }
        let error = one("logit_bia", TokenList::Biases(vec![])).expect_err("no such list");
        assert!(error.to_string().contains("logit_bia is not a list of SAMPLING_LISTS"), "{error}");
        assert_eq!(error.parameter(), None);
    }

    #[test]
    fn lists_that_are_too_large_together_name_the_largest() {
        let text = |len| Some(" ".repeat(len));
        let ids = || TokenList::Ids(vec![0; 1 << 18]);
        let one_byte_more = (2 << 20) + 1;
        let error =
            SamplingExtras::new([("allowed_token_ids", ids())], text(one_byte_more)).expect_err("too large");
        assert!(error.to_string().contains("and extra_args take 3145729 bytes"), "{error}");
        assert_eq!(error.parameter(), Some("extra_args"));
        SamplingExtras::new([("allowed_token_ids", ids())], text(one_byte_more - 1))
            .expect("as large as may be");
        let biases = TokenList::Biases(vec![(0, 0.0); MAX_LISTED_TOKENS]);
        let error = one("logit_bias", biases).expect_err("too large");
        assert_eq!(error.parameter(), Some("logit_bias"));
        SamplingExtras::new([], text(MAX_SAMPLING_EXTRAS_BYTES)).expect("as large as may be");
        SamplingExtras::new([], text(MAX_SAMPLING_EXTRAS_BYTES + 1)).expect_err("too large");
        let rows =
            |num_ids| PromptTokens { start: 0, is_alone: true, width: 1, ids: vec![0; num_ids].into() };
        let most = MAX_SAMPLING_EXTRAS_BYTES / 4;
        SamplingExtras::default().with_prompt_tokens(rows(most)).expect("as large as may be");
        let error = SamplingExtras::default().with_prompt_tokens(rows(most + 1)).expect_err("too large");
        assert_eq!(error.parameter(), Some("prompt_logprob_token_ids"));
    }

    #[test]
    fn ids_for_the_places_of_a_prompt_are_whole_rows() {
        for (width, ids, expected) in [
            (2, vec![1, 2, 3], Some("3 ids, which are not rows of 2")),
            (0, vec![1], Some("1 ids, which are not rows of 0")),
            (1, vec![], Some("0 ids, which are not rows of 1")),
            (1, vec![4, -2], Some("the token id -2")),
            (2, vec![4, -1], None),
        ] {
            let tokens = PromptTokens { start: 7, is_alone: false, width, ids: ids.into() };
            match (SamplingExtras::default().with_prompt_tokens(tokens.clone()), expected) {
                (Ok(extras), None) => assert_eq!(extras.prompt_tokens(), Some(&tokens)),
                (Err(error), Some(expected)) => {
                    assert!(error.to_string().contains(expected), "{error}");
                    assert_eq!(error.parameter(), Some(PromptTokens::NAME));
                }
                (got, expected) => panic!("{got:?}, not {expected:?}"),
            }
        }
    }

    #[test]
    fn the_largest_lists_are_taken() {
        for row in SAMPLING_LISTS {
            let num_entries =
                if row.name == "logit_bias" { MAX_SAMPLING_EXTRAS_BYTES / 8 } else { row.max_entries };
            let list = match TokenList::empty(row.kind) {
                TokenList::Ids(_) => TokenList::Ids(vec![1; num_entries]),
                TokenList::Biases(_) => TokenList::Biases(vec![(1, 0.5); num_entries]),
                TokenList::Words(_) => TokenList::Words(vec![vec![1; MAX_WORD_TOKENS]; num_entries]),
            };
            let extras = one(row.name, list.clone()).expect("as large as may be");
            assert_eq!(extras.list(row.name), Some(&list));
            assert_eq!(extras.lists().filter(|(_, list)| list.num_entries() > 0).count(), 1);
        }
    }

    #[test]
    fn lists_come_in_the_order_of_the_table_and_the_last_of_a_name_counts() {
        let words = TokenList::Words(vec![vec![1, 2], vec![3]]);
        let given = [("bad_words", TokenList::Words(vec![])), ("bad_words", words)];
        let extras = SamplingExtras::new(given, None).expect("lists");
        assert_eq!(
            extras.lists().map(|(row, _)| row.name).collect::<Vec<_>>(),
            SAMPLING_LISTS.map(|row| row.name)
        );
        let ids: Vec<Vec<i32>> = extras.lists().map(|(_, list)| list.token_ids().collect()).collect();
        assert_eq!(ids, [vec![], vec![], vec![1, 2, 3], vec![]]);
        assert_eq!(ids.len(), NUM_LISTS);
        assert_eq!(extras.list("extra_args"), None);
    }

    #[test]
    fn an_attachment_equals_itself_alone() {
        let attachment = Attachment(Arc::new(1u8));
        let plain = SamplingExtras::default();
        let with = plain.clone().with_attachment(Some(attachment.clone()));
        assert_eq!(with, plain.clone().with_attachment(Some(attachment)));
        assert_ne!(with, plain.clone().with_attachment(Some(Attachment(Arc::new(1u8)))));
        assert_ne!(with, plain);
    }
}
