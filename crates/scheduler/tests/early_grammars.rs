//! Grammars that are compiled while their requests are on their way: what is ready by the next plan runs in it.

mod common;

use std::{
    any::Any,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
};

use common::{request, scheduler, step};
use scheduler::{
    FinishReason, GrammarCompiler, GrammarKind, GrammarNews, GrammarProgress, GrammarSpec, GrammarWork,
    NewRequest, RequestError, RequestKey, Scheduler, SchedulerConfig, egress::Consumer,
};

/// A grammar that is as far as its text says: `ready`, `failed`, else it is being compiled.
#[derive(Debug)]
struct Work(AtomicU8);

#[derive(Debug)]
struct Compiler;

impl GrammarWork for Work {
    fn progress(&self) -> GrammarProgress {
        match self.0.load(Ordering::Relaxed) {
            0 => GrammarProgress::Compiling,
            1 => GrammarProgress::Ready,
            _ => GrammarProgress::Failed(RequestError::GrammarFailed),
        }
    }

    fn num_taken(&self, _: &[i32]) -> Option<usize> {
        None
    }

    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

impl GrammarCompiler for Compiler {
    fn begin(&self, _: RequestKey, spec: &Arc<GrammarSpec>, _: bool) -> Arc<dyn GrammarWork> {
        Arc::new(Work(AtomicU8::new(match &*spec.text {
            "ready" => 1,
            "failed" => 2,
            _ => 0,
        })))
    }
}

fn engine() -> (Scheduler, Consumer) {
    let mut scheduler = scheduler(&SchedulerConfig::new(64, 256), 2);
    let consumer = scheduler.take_consumer().expect("taken once");
    scheduler.handle().compile_grammars_with(Box::new(Compiler));
    (scheduler, consumer)
}

fn add(scheduler: &Scheduler, id: &str, grammar: &str) -> RequestKey {
    let grammar = Some(Arc::new(GrammarSpec::new(GrammarKind::Regex, grammar)));
    let new = NewRequest { grammar, ..request(scheduler, id, vec![1; 3], 8) };
    let key = new.key;
    scheduler.handle().add_request(new).expect("a request that fits");
    key
}

#[test]
fn a_request_whose_grammar_is_ready_runs_in_the_next_step() {
    let (mut scheduler, _consumer) = engine();
    let (ready, slow) = (add(&scheduler, "a", "ready"), add(&scheduler, "b", "slow"));
    assert_eq!(step(&mut scheduler), ["a"]);
    assert_eq!(scheduler.handle().stats().num_waiting_for_grammar, 1);
    let news = scheduler.take_grammar_news();
    let works: Vec<(RequestKey, bool)> = news
        .into_iter()
        .map(|news| match news {
            GrammarNews::Arrived { key, work, .. } => {
                (key, work.is_some_and(|work| work.into_any().downcast::<Work>().is_ok()))
            }
            GrammarNews::Left(key) => panic!("{key:?} has not left"),
        })
        .collect();
    assert_eq!(works, [(ready, true), (slow, true)], "the compiler gets back what it has begun");
    scheduler.handle().grammar_ready(slow);
    scheduler.handle().grammar_ready(ready); // again: it runs already
    assert_eq!(step(&mut scheduler), ["a", "b"]);
    assert_eq!(scheduler.handle().stats().num_waiting_for_grammar, 0);
}

#[test]
fn a_request_whose_grammar_has_failed_ends_when_it_arrives() {
    let (mut scheduler, mut consumer) = engine();
    let key = add(&scheduler, "a", "failed");
    assert_eq!(step(&mut scheduler), Vec::<String>::new());
    let mut ends = Vec::new();
    consumer.drain(|output| ends.push((output.key, output.finish_reason, output.error)));
    assert_eq!(ends, [(key, Some(FinishReason::Error), RequestError::GrammarFailed)]);
    assert!(!scheduler.has_unfinished_requests());
    let news = scheduler.take_grammar_news();
    assert!(matches!(news[..], [GrammarNews::Arrived { .. }, GrammarNews::Left(_)]), "{news:?}");
    scheduler.handle().grammar_failed(key); // what was on its way
    assert_eq!(step(&mut scheduler), Vec::<String>::new());
}

#[test]
fn a_key_that_is_used_twice_lets_no_other_request_run() {
    let (mut scheduler, _consumer) = engine();
    let key = add(&scheduler, "a", "slow");
    let grammar = Some(Arc::new(GrammarSpec::new(GrammarKind::Regex, "ready")));
    let again = NewRequest { key, grammar, ..request(&scheduler, "b", vec![1; 3], 8) };
    scheduler.handle().add_request(again).expect("its key is looked at later");
    assert_eq!(step(&mut scheduler), Vec::<String>::new(), "the grammar of the first is not ready");
}
