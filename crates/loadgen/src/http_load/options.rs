//! `HttpLoadOptions`: how much load, how fast, and what counts as good.

use std::time::Duration;

use scheduler::ConfigError;

/// Requests of one run at most.
pub const MAX_REQUESTS: usize = 10_000_000;
/// Prompts and answers are at most this long.
pub const MAX_LENGTH: u32 = 1 << 24;
const MAX_RATE: f64 = 1e6;

/// When requests are sent.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Rate {
    /// As soon as `max_concurrency` lets them.
    Unlimited,
    /// So many per second, in gaps of a gamma distribution of this shape: 1 is a Poisson process, less is burstier.
    PerSecond {
        /// Requests per second.
        rate: f64,
        /// Shape.
        burstiness: f64,
    },
    /// When the trace says.
    Recorded,
}

/// Limits that a good request keeps, in milliseconds.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Goodput {
    /// Time to the first token.
    pub ttft_ms: Option<f64>,
    /// Time per output token after it.
    pub tpot_ms: Option<f64>,
    /// Time to the last token.
    pub e2el_ms: Option<f64>,
}

impl Goodput {
    /// Whether there is any limit.
    #[must_use]
    pub fn is_asked_for(&self) -> bool {
        self.ttft_ms.is_some() || self.tpot_ms.is_some() || self.e2el_ms.is_some()
    }
}

/// One run.
#[derive(Clone, PartialEq, Debug)]
pub struct HttpLoadOptions {
    /// `http://host:port`, with a path before the endpoint if there is one.
    pub base_url: String,
    /// `/v1/completions` or `/v1/chat/completions`.
    pub endpoint: String,
    /// JSON object with every field of a request's body but the prompt and `max_tokens`.
    pub fields: String,
    /// Sent as a bearer token.
    pub api_key: Option<String>,
    /// Requests measured.
    pub num_requests: usize,
    /// Requests sent before them and not measured.
    pub num_warmups: usize,
    /// Requests open at a time; None: no limit.
    pub max_concurrency: Option<usize>,
    /// When they are sent.
    pub rate: Rate,
    /// Of arrivals and prompts.
    pub seed: u64,
    /// After which a request is given up.
    pub timeout: Duration,
    /// Percentiles of the report, each in 0..=100.
    pub percentiles: Vec<f64>,
    /// Limits.
    pub goodput: Goodput,
}

impl HttpLoadOptions {
    /// # Errors
    /// The first number outside its limits.
    pub fn check(&self) -> Result<(), ConfigError> {
        within("num_prompts", self.num_requests, 1, MAX_REQUESTS)?;
        within("warmup", self.num_warmups, 0, MAX_REQUESTS)?;
        if let Some(limit) = self.max_concurrency {
            within("max_concurrency", limit, 1, MAX_REQUESTS)?;
        }
        if let Rate::PerSecond { rate, burstiness } = self.rate {
            positive("request_rate", rate, MAX_RATE)?;
            positive("burstiness", burstiness, 1e3)?;
        }
        for &percentile in &self.percentiles {
            if !(0.0..=100.0).contains(&percentile) {
                let rule = "between 0 and 100".to_owned();
                return Err(ConfigError { name: "metric_percentiles", rule, value: percentile.to_string() });
            }
        }
        let limits = [
            ("goodput ttft", self.goodput.ttft_ms),
            ("goodput tpot", self.goodput.tpot_ms),
            ("goodput e2el", self.goodput.e2el_ms),
        ];
        for (name, limit) in limits {
            positive(name, limit.unwrap_or(1.0), 1e9)?;
        }
        Ok(())
    }
}

/// Refuse a number outside `low..=high`.
pub(super) fn within(name: &'static str, value: usize, low: usize, high: usize) -> Result<(), ConfigError> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(ConfigError { name, rule: format!("between {low} and {high}"), value: value.to_string() })
}

fn positive(name: &'static str, value: f64, high: f64) -> Result<(), ConfigError> {
    if value > 0.0 && value <= high {
        return Ok(());
    }
    Err(ConfigError { name, rule: format!("above 0 and at most {high}"), value: value.to_string() })
}
