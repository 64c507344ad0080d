//! The library's limits.

use llguidance::api::ParserLimits;

use crate::MAX_PROPERTIES;

/// What a grammar may cost. Fuel is counted work, so a grammar compiles or does not whatever else the machine does.
pub(crate) fn limits() -> ParserLimits {
    ParserLimits {
        initial_lexer_fuel: 1_000_000,
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
        // An object has four for each property that may be left out.
        max_items_in_row: 5 * MAX_PROPERTIES,
        max_grammar_size: 500_000,
        max_lexer_states: 50_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}
