//! Calls into a library that may panic on a file or text from outside: the panic becomes an error, and its report is
//! not printed.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// Number of guarded calls that this thread is in.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Run library code and turn a panic into a message: a tokenizer file or a text from outside must not end the process.
///
/// This guards only what the current thread does. A call that distributes its work over threads must guard each part.
pub(crate) fn guarded<T, E: ToString>(call: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    silence_guarded_panics();
    DEPTH.set(DEPTH.get() + 1);
    // The closures only read the tokenizer (or build a new one that is dropped on a panic).
    let outcome = catch_unwind(AssertUnwindSafe(call));
    DEPTH.set(DEPTH.get() - 1);
    match outcome {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(panic) => Err(format!("internal failure: {}", panic_message(panic.as_ref()))),
    }
}

/// Panics are reported before they are caught, so the hook that reports them must know which ones become errors. All
/// others are reported as before.
fn silence_guarded_panics() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let report = take_hook();
        set_hook(Box::new(move |info| {
            // A thread that is ending is in no guarded call any more.
            if DEPTH.try_with(Cell::get).unwrap_or(0) == 0 {
                report(info);
            }
        }));
    });
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("panic")
}
