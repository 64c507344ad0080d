//! `SamplingParams`: how a request is sampled and when it stops. Its numbers are the rows of one table.
//!
//! A row says all there is to say of a number: what it means, its default, what it is for and its range. The order of
//! the rows is the order of the columns of `sampling_float` and `sampling_int` and of the numbers on the wire. The
//! keywords of `add_request` follow from the table, and in Python the checks, the requests' descriptions and what the
//! sampler is given. `docs/adding-a-sampling-parameter.md` adds a row.

pub(crate) mod extras;
pub(crate) mod repetition_detection;

use std::sync::Arc;

use crate::sampling_params::{extras::SamplingExtras, repetition_detection::RepetitionDetection};

/// What a number is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NumberRole {
    /// Divides the logits.
    Scale,
    /// Keeps some of the logits of a row that is not greedy, the largest among them; the default keeps all.
    Filter,
    /// Changes the logits of tokens that the request has already; the default changes none.
    Penalty,
    /// Not taken from the caller: the front end works it out.
    Computed,
}

impl NumberRole {
    /// Its name in Python.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Scale => "scale",
            Self::Filter => "filter",
            Self::Penalty => "penalty",
            Self::Computed => "computed",
        }
    }
}

/// The values that a caller may give.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct NumberRange {
    /// The least value.
    pub low: f64,
    /// The largest value; infinite: there is none.
    pub high: f64,
    /// Whether `low` itself is refused.
    pub is_low_excluded: bool,
}

impl NumberRange {
    /// Any: the front end gives what fits.
    const ANY: Self = Self::closed(f64::NEG_INFINITY, f64::INFINITY);

    const fn closed(low: f64, high: f64) -> Self {
        Self { low, high, is_low_excluded: false }
    }

    const fn at_least(low: f64) -> Self {
        Self::closed(low, f64::INFINITY)
    }

    const fn above(low: f64, high: f64) -> Self {
        Self { low, high, is_low_excluded: true }
    }
}

/// A number with its type.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Number {
    /// A column of `sampling_float`, where it has 32 bits.
    Float(f64),
    /// A column of `sampling_int`.
    Int(i64),
}

/// Where a number of a request is.
#[derive(PartialEq, Debug)]
pub enum NumberMut<'a> {
    /// A column of `sampling_float`.
    Float(&'a mut f32),
    /// A column of `sampling_int`.
    Int(&'a mut i64),
}

/// A row of the table.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SamplingNumber {
    /// Field, column, keyword, and the name that callers use.
    pub name: &'static str,
    /// What it means.
    pub description: &'static str,
    /// Its value when it is left out.
    pub default: Number,
    /// What it is for.
    pub role: NumberRole,
    /// What a caller may give.
    pub range: NumberRange,
}

macro_rules! sampling_table {
    (
        floats { $(#[doc = $float_doc:literal] $float:ident: $float_default:literal, $float_role:ident, $float_range:expr;)+ }
        ints { $(#[doc = $int_doc:literal] $int:ident: $int_default:literal, $int_role:ident, $int_range:expr;)+ }
    ) => {
        /// How a request is sampled and when it stops.
        #[derive(Clone, Debug, PartialEq)]
        pub struct SamplingParams {
            /// Output tokens at most; 0 ends with the prefill.
            pub max_tokens: u32,
            /// Output tokens before EOS and stop ids may be sampled.
            pub min_tokens: u32,
            /// The token that ends the request; `None` when EOS is ignored.
            pub eos_token_id: Option<i32>,
            /// Further tokens that end it.
            pub stop_token_ids: Box<[i32]>,
            /// Ends an output that repeats itself; `None`: nothing is looked for.
            pub repetition_detection: Option<RepetitionDetection>,
            $(#[doc = $float_doc] pub $float: f32,)+
            $(#[doc = $int_doc] pub $int: i64,)+
            /// Parameters that are lists; shared by the samples of a request.
            pub extras: Option<Arc<SamplingExtras>>,
        }

        impl Default for SamplingParams {
            fn default() -> Self {
                Self {
                    max_tokens: 16,
                    min_tokens: 0,
                    eos_token_id: None,
                    stop_token_ids: Box::new([]),
                    repetition_detection: None,
                    $($float: $float_default,)+
                    $($int: $int_default,)+
                    extras: None,
                }
            }
        }

        /// How many rows are floats.
        pub const NUM_FLOATS: usize = [$(stringify!($float)),+].len();
        /// How many rows are integers.
        pub const NUM_INTS: usize = [$(stringify!($int)),+].len();
        /// Names of the floats, in order.
        pub const FLOAT_NAMES: [&str; NUM_FLOATS] = [$(stringify!($float)),+];
        /// Names of the integers, in order.
        pub const INT_NAMES: [&str; NUM_INTS] = [$(stringify!($int)),+];

        /// The table: floats first.
        pub const SAMPLING_NUMBERS: [SamplingNumber; NUM_FLOATS + NUM_INTS] = [
            $(SamplingNumber {
                name: stringify!($float),
                description: $float_doc,
                default: Number::Float($float_default),
                role: NumberRole::$float_role,
                range: $float_range,
            },)+
            $(SamplingNumber {
                name: stringify!($int),
                description: $int_doc,
                default: Number::Int($int_default),
                role: NumberRole::$int_role,
                range: $int_range,
            },)+
        ];

        impl SamplingParams {
            /// The floats, in the order of `FLOAT_NAMES`.
            #[must_use]
            pub fn floats(&self) -> [f32; NUM_FLOATS] {
                [$(self.$float),+]
            }

            /// The integers, in the order of `INT_NAMES`.
            #[must_use]
            pub fn ints(&self) -> [i64; NUM_INTS] {
                [$(self.$int),+]
            }

            /// Replace all numbers, given in the same orders.
            pub fn set_numbers(&mut self, floats: [f32; NUM_FLOATS], ints: [i64; NUM_INTS]) {
                [$(self.$float),+] = floats;
                [$(self.$int),+] = ints;
            }

            /// The place of the number of this name.
            pub fn number_mut(&mut self, name: &str) -> Option<NumberMut<'_>> {
                match name {
                    $(stringify!($float) => Some(NumberMut::Float(&mut self.$float)),)+
                    $(stringify!($int) => Some(NumberMut::Int(&mut self.$int)),)+
                    _ => None,
                }
            }
        }
    };
}

sampling_table! {
    floats {
        /// Below 1e-5: greedy; lower than 0.01 counts as 0.01.
        temperature: 1.0, Scale, NumberRange::closed(0.0, 2.0);
        /// Nucleus sampling.
        top_p: 1.0, Filter, NumberRange::above(0.0, 1.0);
        /// Least share of the likeliest token's probability.
        min_p: 0.0, Filter, NumberRange::closed(0.0, 1.0);
        /// Keep logits within so many standard deviations of the largest; 0 and less: all.
        top_n_sigma: 0.0, Filter, NumberRange::at_least(-1.0);
        /// For tokens that are in the output.
        presence_penalty: 0.0, Penalty, NumberRange::closed(-2.0, 2.0);
        /// For each time a token is in the output.
        frequency_penalty: 0.0, Penalty, NumberRange::closed(-2.0, 2.0);
        /// Over 1: fewer tokens of prompt and output.
        repetition_penalty: 1.0, Penalty, NumberRange::above(0.0, f64::INFINITY);
        /// Exponent of the length by which the score of a beam is divided.
        length_penalty: 1.0, Computed, NumberRange::ANY;
    }
    ints {
        /// Keep so many tokens; 0 and -1: all.
        top_k: 0, Filter, NumberRange::at_least(-1.0);
        /// Key of the counter-based random numbers.
        seed: 0, Computed, NumberRange::ANY;
        /// Log-probabilities returned per token; -1: none.
        num_logprobs: -1, Computed, NumberRange::ANY;
        /// Log-probabilities returned per token of the prompt but the first; -1: none.
        num_prompt_logprobs: -1, Computed, NumberRange::ANY;
        /// Number of the adapter whose weights are added to the model's; 0: none.
        adapter: 0, Computed, NumberRange::ANY;
        /// Beams of the search that the request is one of; 0: of none.
        beam_width: 0, Computed, NumberRange::ANY;
        /// 1: the request ends with the vector of its prompt and without a token, whatever `max_tokens` says; 0: it does not.
        pooling: 0, Computed, NumberRange::ANY;
    }
}

impl SamplingParams {
    /// The first place of a prompt whose logits are asked for; none if nothing is asked of it.
    pub(crate) fn first_judge(&self) -> Option<u32> {
        let named = self.extras.as_ref().and_then(|extras| extras.prompt_tokens());
        let start = named.filter(|tokens| tokens.is_alone).map_or(0, |tokens| tokens.start);
        (self.num_prompt_logprobs >= 0).then_some(start)
    }

    /// Whether its tokens may come from elsewhere than the model: nothing is said or kept of each that is sampled, and
    /// none but the last ends it.
    #[expect(clippy::float_cmp, reason = "a penalty that changes nothing has exactly this value")]
    pub(crate) fn takes_tokens_unseen(&self) -> bool {
        self.num_logprobs < 0
            && self.num_prompt_logprobs < 0
            && (self.presence_penalty, self.frequency_penalty) == (0.0, 0.0)
            && self.repetition_penalty == 1.0
            && self.extras.is_none()
            && self.repetition_detection.is_none()
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "numbers that are handed on, not computed")]
mod tests {
    use super::{FLOAT_NAMES, INT_NAMES, NUM_FLOATS, Number, NumberMut, SAMPLING_NUMBERS, SamplingParams};

    #[test]
    fn a_number_is_the_same_by_its_name_and_by_its_place() {
        let mut params = SamplingParams::default();
        for (place, name) in FLOAT_NAMES.into_iter().enumerate() {
            match params.number_mut(name) {
                Some(NumberMut::Float(number)) => *number = 0.5 + place as f32,
                other => panic!("{name} is {other:?}"),
            }
        }
        for (place, name) in INT_NAMES.into_iter().enumerate() {
            match params.number_mut(name) {
                Some(NumberMut::Int(number)) => *number = 100 + place as i64,
                other => panic!("{name} is {other:?}"),
            }
        }
        assert_eq!(params.floats(), std::array::from_fn(|place| 0.5 + place as f32));
        assert_eq!(params.ints(), std::array::from_fn(|place| 100 + place as i64));
        assert_eq!((params.temperature, params.top_k), (0.5, 100));
        let mut copy = SamplingParams::default();
        copy.set_numbers(params.floats(), params.ints());
        assert_eq!(copy, params);
        assert_eq!(params.number_mut("max_tokens"), None);
    }

    #[test]
    fn the_table_says_the_defaults_in_the_order_of_the_columns() {
        let names: Vec<_> = SAMPLING_NUMBERS.iter().map(|number| number.name).collect();
        assert_eq!(names, [&FLOAT_NAMES[..], &INT_NAMES[..]].concat());
        let params = SamplingParams::default();
        for (place, number) in SAMPLING_NUMBERS.iter().enumerate() {
            match number.default {
                Number::Float(default) => assert_eq!(params.floats()[place], default as f32),
                Number::Int(default) => assert_eq!(params.ints()[place - NUM_FLOATS], default),
            }
        }
    }

    #[test]
    fn every_default_is_in_its_range() {
        for number in SAMPLING_NUMBERS {
            let default = match number.default {
                Number::Float(value) => value,
                Number::Int(value) => value as f64,
            };
            let range = number.range;
            assert!(range.low <= default && default <= range.high, "{}", number.name);
            assert!(!range.is_low_excluded || default > range.low, "{}", number.name);
        }
    }
}
