//! Azure's format: a CSV of three columns. Its fields hold no quotes and no commas, so a line is split at commas.

use std::{str::FromStr, time::Duration};

use super::{MAX_REQUEST_TOKENS, PromptContent, RecordError, TraceRequest, check_lengths, shortened};

pub(super) const HEADER: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";
const FORM: &str = "each line must be TIMESTAMP,ContextTokens,GeneratedTokens";
const TIME_RULE: &str = "a time in UTC such as 2023-11-16 18:15:46.6805900";

/// Where the columns are, and when the trace began.
#[derive(Debug)]
pub(super) struct Columns {
    timestamp: usize,
    context: usize,
    generated: usize,
    count: usize,
    /// Nanoseconds since the epoch of the first request.
    begin: Option<i128>,
}

impl Columns {
    /// Read the header; the columns may be in any order, with others between them.
    pub(super) fn from_header(line: &[u8]) -> Result<Self, RecordError> {
        let text = text(line)?;
        let names: Vec<&str> = text.split(',').map(str::trim).collect();
        let place = |field: &'static str| {
            names.iter().position(|&name| name == field).ok_or_else(|| RecordError::MissingField {
                field,
                rule: format!("a column of the header, as in {HEADER}"),
            })
        };
        Ok(Self {
            timestamp: place("TIMESTAMP")?,
            context: place("ContextTokens")?,
            generated: place("GeneratedTokens")?,
            count: names.len(),
            begin: None,
        })
    }

    /// One line, the `number`th request.
    pub(super) fn parse(&mut self, line: &[u8], number: u64) -> Result<TraceRequest, RecordError> {
        let text = text(line)?;
        let fields: Vec<&str> = text.split(',').map(str::trim).collect();
        if fields.len() != self.count {
            let problem = format!("{} fields where the header has {}", fields.len(), self.count);
            return Err(RecordError::Form { problem, rule: FORM });
        }
        let timestamp = fields[self.timestamp];
        let wrong_time = |rule: &str| RecordError::Field {
            field: "TIMESTAMP",
            rule: rule.to_owned(),
            value: shortened(timestamp),
        };
        let nanoseconds = nanoseconds_of(timestamp).ok_or_else(|| wrong_time(TIME_RULE))?;
        let since = nanoseconds - *self.begin.get_or_insert(nanoseconds);
        let since = u64::try_from(since)
            .map_err(|_| wrong_time("no earlier than the first line; sort the trace by time"))?;
        let (num_prompt_tokens, num_output_tokens) = check_lengths(
            ("ContextTokens", whole_number("ContextTokens", fields[self.context], 1)?),
            ("GeneratedTokens", whole_number("GeneratedTokens", fields[self.generated], 0)?),
        )?;
        Ok(TraceRequest {
            arrival: Duration::from_nanos(since),
            num_prompt_tokens,
            num_output_tokens,
            content: PromptContent::Unique(number),
        })
    }
}

fn text(line: &[u8]) -> Result<&str, RecordError> {
    std::str::from_utf8(line)
        .map_err(|error| RecordError::Form { problem: format!("not UTF-8 ({error})"), rule: FORM })
}

fn whole_number(field: &'static str, value: &str, low: u64) -> Result<u64, RecordError> {
    let high = u64::from(MAX_REQUEST_TOKENS);
    value.parse().ok().filter(|number| (low..=high).contains(number)).ok_or_else(|| RecordError::Field {
        field,
        rule: format!("a whole number between {low} and {high}"),
        value: shortened(value),
    })
}

/// `YYYY-MM-DD HH:MM:SS[.fraction]` in UTC (`T` between and `Z` or `+00:00` behind are understood) as nanoseconds since
/// the epoch. `None` for anything else.
fn nanoseconds_of(text: &str) -> Option<i128> {
    let text = text.strip_suffix('Z').or_else(|| text.strip_suffix("+00:00")).unwrap_or(text);
    let (date, time) = text.split_once([' ', 'T'])?;
    let [year, month, day] = numbers(date, '-')?;
    let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let [hour, minute, second] = numbers(time, ':')?;
    let in_range = (1970..=9999).contains(&year) && hour < 24 && minute < 60 && second <= 60;
    let months = [31, if is_leap(year) { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let length = *months.get(usize::try_from(month).ok()?.checked_sub(1)?)?;
    if !in_range || day == 0 || day > length || !(1..=9).contains(&fraction.len()) {
        return None;
    }
    let before = |year: i64| (year - 1) * 365 + (year - 1) / 4 - (year - 1) / 100 + (year - 1) / 400;
    let days = before(year) - before(1970) + months.iter().take(month as usize - 1).sum::<i64>() + day - 1;
    let nanoseconds = digits::<i64>(fraction)? * 10i64.pow(9 - fraction.len() as u32);
    let seconds = ((days * 24 + hour) * 60 + minute) * 60 + second;
    Some(i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds))
}

fn is_leap(year: i64) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

/// Three numbers of digits only.
fn numbers(text: &str, separator: char) -> Option<[i64; 3]> {
    let mut parts = text.split(separator).map(digits);
    let numbers = [parts.next()??, parts.next()??, parts.next()??];
    parts.next().is_none().then_some(numbers)
}

/// A number of digits only: no sign.
fn digits<T: FromStr>(text: &str) -> Option<T> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::nanoseconds_of;

    const SECOND: i128 = 1_000_000_000;

    #[test]
    fn times_count_from_the_epoch() {
        assert_eq!(nanoseconds_of("1970-01-01 00:00:00"), Some(0));
        // What `date --utc --date=… +%s` says.
        assert_eq!(nanoseconds_of("2023-11-16 18:15:46.6805900"), Some(1_700_158_546 * SECOND + 680_590_000));
        assert_eq!(nanoseconds_of("2024-02-29T23:59:59Z"), Some(1_709_251_199 * SECOND));
        assert_eq!(nanoseconds_of("2000-03-01 00:00:00.5+00:00"), Some(951_868_800 * SECOND + SECOND / 2));
    }

    #[test]
    fn what_is_no_time_is_none() {
        for text in [
            "",
            "2023-11-16",
            "2023-11-31 00:00:00",
            "2023-02-29 00:00:00",
            "2023-13-01 00:00:00",
            "2023-00-01 00:00:00",
            "2023-11-16 24:00:00",
            "2023-11-16 -1:00:00",
            "2023-11-16 18:15",
            "2023-11-16 18:15:46.",
            "2023-11-16 18:15:46.6805900123",
            "2023-11-16 18:15:46+02:00",
            "NaN",
        ] {
            assert_eq!(nanoseconds_of(text), None, "{text}");
        }
    }
}
