//! `Compiles`: the threads that make matchers of grammars, from the moment when a request is handed in.

use std::{
    io,
    sync::{Arc, Mutex},
};

use scheduler::{
    EngineHandle, GrammarCompiler, GrammarKind, GrammarSpec, GrammarWork, RequestError, RequestKey,
};

use crate::{
    compile::{
        cache::Cache,
        compile,
        work_queue::{JobSender, Threads, WorkQueue},
    },
    error::GrammarError,
    matcher::Matcher,
    room::{Charge, Room},
    sample::{Matching, Sample, lock, thinking::Thinking},
    spare_memory::{after_dropping, giving_back},
    vocabulary::Vocabulary,
};

/// Grammars that may wait to be compiled; the requests of further ones fail.
pub const MAX_WAITING_COMPILES: usize = 1024;

/// Recursion of the library's compiler takes 2.5 KB a level of a schema, and more in products of `allOf`.
pub(crate) const STACK_BYTES: usize = 16 << 20;
const NICENESS: i32 = 5;
/// A grammar whose text is longer may take long to compile, and so may its masks and what is known before there is one.
pub(crate) const LARGE_TEXT_BYTES: usize = 64 << 10;
/// Of what compiles large grammars: half a second is not to be taken from steps.
pub(crate) const LARGE_NICENESS: i32 = 10;

/// See the module docs. Its threads end with it.
#[derive(Debug)]
pub(crate) struct Compiles {
    jobs: WorkQueue<Job>,
    /// Of large grammars: no other waits behind them.
    large_jobs: WorkQueue<Job>,
}

/// Begins compiles on the threads that hand requests in.
#[derive(Debug)]
struct Compiler {
    jobs: JobSender<Job>,
    large_jobs: JobSender<Job>,
}

/// What the threads do.
#[derive(Debug)]
enum Job {
    Compile(CompileJob),
    /// Keep what a sample whose request has left found out about its grammar.
    Learn {
        spec: Arc<GrammarSpec>,
        sample: Arc<Sample>,
    },
}

#[derive(Debug)]
struct CompileJob {
    key: RequestKey,
    spec: Arc<GrammarSpec>,
    sample: Arc<Sample>,
    ignores_eos: bool,
}

impl Compiles {
    /// Start so many threads and one for large grammars, and have the grammars of requests that are handed in compiled by
    /// them.
    ///
    /// # Errors
    /// The system starts no further thread.
    pub(crate) fn start(
        handle: &EngineHandle,
        vocabulary: &Arc<Vocabulary>,
        num_threads: usize,
    ) -> io::Result<Self> {
        let (cache, room) = (Arc::new(Mutex::new(Cache::default())), Arc::new(Room::default()));
        let start = |name, count, niceness| {
            let threads = Threads { name, count, stack_bytes: STACK_BYTES, niceness };
            let (answering, vocabulary) = (handle.clone(), vocabulary.clone());
            let (cache, room) = (cache.clone(), room.clone());
            WorkQueue::start(&threads, move |job| match job {
                Job::Compile(job) => match job.run(&vocabulary, &cache, &room) {
                    Ok(()) => answering.grammar_ready(job.key),
                    Err(GrammarError::NoRoom) => {
                        job.sample.fail(RequestError::GrammarsFull);
                        answering.grammars_full(job.key);
                    }
                    Err(GrammarError::UnreadableTokenizer(_)) => {
                        job.sample.fail(RequestError::TokenizerUnreadable);
                        answering.tokenizer_unreadable(job.key);
                    }
                    Err(_) => {
                        job.sample.fail(RequestError::GrammarFailed);
                        answering.grammar_failed(job.key);
                    }
                },
                Job::Learn { spec, sample } => {
                    if let Some(matcher) = sample.end().and_then(Matching::into_matcher) {
                        let num_bytes = matcher.size().map_or(0, |size| size.num_bytes);
                        lock(&cache).learn(&without_thoughts(&spec), matcher);
                        after_dropping(num_bytes);
                    }
                }
            })
        };
        let jobs = start("grammar-compile", num_threads, NICENESS)?;
        let large_jobs = start("grammar-compile-large", 1, LARGE_NICENESS)?;
        let compiles = Self { jobs, large_jobs };
        // If another one did before, requests are begun when they have arrived.
        handle.compile_grammars_with(Box::new(compiles.compiler()));
        Ok(compiles)
    }

    fn compiler(&self) -> Compiler {
        Compiler { jobs: self.jobs.sender(), large_jobs: self.large_jobs.sender() }
    }

    /// Begin to compile the grammar of a request that has arrived; the sample says if too many wait.
    pub(crate) fn begin(&self, key: RequestKey, spec: &Arc<GrammarSpec>, ignores_eos: bool) -> Arc<Sample> {
        self.compiler().begin_sample(key, spec, ignores_eos)
    }

    /// Keep what a sample whose request has left found out; a full queue forgets it.
    pub(crate) fn learn(&self, spec: Arc<GrammarSpec>, sample: Arc<Sample>) {
        let jobs = if is_large(&spec) { &self.large_jobs } else { &self.jobs };
        let _ = jobs.push(Job::Learn { spec, sample }, MAX_WAITING_COMPILES);
    }
}

impl GrammarCompiler for Compiler {
    fn begin(&self, key: RequestKey, spec: &Arc<GrammarSpec>, ignores_eos: bool) -> Arc<dyn GrammarWork> {
        self.begin_sample(key, spec, ignores_eos)
    }
}

impl Compiler {
    fn begin_sample(&self, key: RequestKey, spec: &Arc<GrammarSpec>, ignores_eos: bool) -> Arc<Sample> {
        let sample = Arc::new(Sample::new());
        let job = CompileJob { key, spec: spec.clone(), sample: sample.clone(), ignores_eos };
        let jobs = if is_large(spec) { &self.large_jobs } else { &self.jobs };
        if jobs.push(Job::Compile(job), MAX_WAITING_COMPILES).is_err() {
            sample.fail(RequestError::GrammarsFull);
        }
        sample
    }
}

fn is_large(spec: &GrammarSpec) -> bool {
    spec.text.len() > LARGE_TEXT_BYTES
}

impl CompileJob {
    fn run(
        &self,
        vocabulary: &Vocabulary,
        cache: &Mutex<Cache>,
        room: &Arc<Room>,
    ) -> Result<(), GrammarError> {
        if Arc::strong_count(&self.sample) == 1 {
            return Ok(()); // Its request has left.
        }
        if !room.is_left() {
            return Err(GrammarError::NoRoom);
        }
        let has_grammar = self.spec.kind != GrammarKind::Anything;
        let matcher = if has_grammar { Some(self.matcher(vocabulary, cache)?) } else { None };
        let thinking = self.spec.thinking.as_ref().map(|gate| Thinking::new(gate, has_grammar));
        let (eos, num_words) = (vocabulary.eos_token_ids(), vocabulary.num_mask_words());
        let matching = Matching::new(matcher, thinking, eos, num_words, self.ignores_eos);
        if is_large(&self.spec) {
            self.sample.note_large();
        }
        self.sample.begin(matching.charged(Charge::new(room.clone())));
        Ok(())
    }

    fn matcher(&self, vocabulary: &Vocabulary, cache: &Mutex<Cache>) -> Result<Matcher, GrammarError> {
        let factory = vocabulary.factory()?;
        let spec = without_thoughts(&self.spec);
        let cached = lock(cache).get(&spec);
        if let Some(matcher) = cached {
            return Ok(matcher);
        }
        let matcher = giving_back(|| compile(&spec, factory))?;
        let own = matcher.deep_clone();
        lock(cache).put(spec, matcher);
        Ok(own)
    }
}

/// The grammar as the cache knows it: thoughts before it make no other one.
fn without_thoughts(spec: &Arc<GrammarSpec>) -> Arc<GrammarSpec> {
    match &spec.thinking {
        None => spec.clone(),
        Some(_) => Arc::new(GrammarSpec { thinking: None, ..(**spec).clone() }),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use scheduler::{
        GrammarCompiler, GrammarKind, GrammarProgress, GrammarSpec, GrammarWork, RequestError, RequestKey,
    };

    use super::{CompileJob, Compiler, Compiles, Job, LARGE_TEXT_BYTES, MAX_WAITING_COMPILES, Sample};
    use crate::{
        check::matcher_of_bytes,
        compile::{
            cache::Cache,
            work_queue::{Threads, WorkQueue},
        },
        error::GrammarError,
        naive_masks::{EOS, NUM_IDS, tokenizer},
        room::{Charge, MAX_MATCHER_BYTES, Room},
        sample::{Matching, Verdict},
        vocabulary::Vocabulary,
    };

    fn spec() -> Arc<GrammarSpec> {
        Arc::new(GrammarSpec::new(GrammarKind::Regex, "(ab|cd){3}e"))
    }

    #[test]
    fn without_room_none_begins() {
        let room = Arc::new(Room::default());
        let vocabulary = Vocabulary::new(Box::new(|| Err("there is no tokenizer".to_owned())), 256);
        let sample = Arc::new(Sample::new());
        let job = CompileJob { key: RequestKey(1), spec: spec(), sample: sample.clone(), ignores_eos: false };
        let run = || job.run(&vocabulary, &Mutex::new(Cache::default()), &room);
        assert!(
            matches!(run(), Err(GrammarError::UnreadableTokenizer(_))),
            "it gets as far as the vocabulary"
        );
        let mut others = Charge::new(room.clone());
        assert!(others.set(MAX_MATCHER_BYTES), "alone they may have it all");
        assert_eq!(run(), Err(GrammarError::NoRoom));
        drop(others);
        assert!(matches!(run(), Err(GrammarError::UnreadableTokenizer(_))));
    }

    #[test]
    fn one_that_grows_where_others_take_the_room_is_crowded_out() {
        let room = Arc::new(Room::default());
        let begin = || {
            let matcher = matcher_of_bytes(&spec()).expect("an expression");
            Matching::new(Some(matcher), None, &[], 8, false).charged(Charge::new(room.clone()))
        };
        let mut alone = begin();
        alone.advance(&[u32::from(b'a')], &[]);
        assert_eq!(alone.verdict(), Verdict::Masked);
        drop(alone);
        let mut crowded = begin();
        let mut others = Charge::new(room.clone());
        let _has_room = others.set(MAX_MATCHER_BYTES);
        let many: Vec<Charge> = (0..MAX_MATCHER_BYTES >> 10).map(|_| Charge::new(room.clone())).collect();
        crowded.advance(&[u32::from(b'a')], &[]);
        assert_eq!(crowded.verdict(), Verdict::CrowdedOut, "it has more than its share of a kilobyte");
        drop(many);
    }

    /// Where the grammar of a request that was handed in ends up.
    fn outcome(compiler: &Compiler, spec: &Arc<GrammarSpec>) -> GrammarProgress {
        let work = compiler.begin(RequestKey(1), spec, false);
        loop {
            match work.progress() {
                GrammarProgress::Compiling => std::thread::yield_now(),
                progress => return progress,
            }
        }
    }

    #[test]
    fn grammars_are_compiled_before_their_requests_arrive() {
        let config = scheduler::SchedulerConfig::new(64, 256);
        let buffers = (0..config.num_buffer_sets()).map(|_| scheduler::StepBuffers::owned(&config)).collect();
        let handle = scheduler::Scheduler::new(config, buffers).expect("numbers that fit").handle();
        let own = tokenizer();
        let vocabulary = Vocabulary::new(Box::new(move || Ok((own.clone(), vec![EOS]))), NUM_IDS);
        let compiles = Compiles::start(&handle, &Arc::new(vocabulary), 1).expect("a thread");
        let compiler = compiles.compiler();
        let expression = |text| Arc::new(GrammarSpec::new(GrammarKind::Regex, text));
        assert_eq!(outcome(&compiler, &expression("(abc|b01)+")), GrammarProgress::Ready);
        let failed = GrammarProgress::Failed(RequestError::GrammarFailed);
        assert_eq!(outcome(&compiler, &expression("(abc")), failed, "no expression");
        let gone = Vocabulary::new(Box::new(|| Err("no such file".to_owned())), NUM_IDS);
        let without = Compiles::start(&handle, &Arc::new(gone), 1).expect("a thread");
        let unreadable = GrammarProgress::Failed(RequestError::TokenizerUnreadable);
        let again = outcome(&without.compiler(), &expression("(abc|b01)+"));
        assert_eq!([outcome(&without.compiler(), &expression("(abc")), again], [unreadable; 2]);
        drop(compiles);
        let full = GrammarProgress::Failed(RequestError::GrammarsFull);
        assert_eq!(outcome(&compiler, &expression("abc")), full, "the compiler has ended");
    }

    #[test]
    fn no_grammar_waits_behind_a_large_one() {
        let (reached, reaches) = std::sync::mpsc::channel();
        let start = |name: &'static str| {
            let reached = reached.clone();
            let threads = Threads { name, count: 1, stack_bytes: 1 << 20, niceness: 0 };
            let jobs: WorkQueue<Job> = WorkQueue::start(&threads, move |_| {
                let _ = reached.send(name);
            })
            .expect("a thread");
            jobs
        };
        let compiles = Compiles { jobs: start("small"), large_jobs: start("large") };
        let choice = |num_bytes| {
            let text = format!("[\"{}\"]", "a".repeat(num_bytes - 4));
            Arc::new(GrammarSpec::new(GrammarKind::Choice, &text))
        };
        let expected = [(LARGE_TEXT_BYTES, "small"), (LARGE_TEXT_BYTES + 1, "large")];
        for (num_bytes, name) in expected {
            let sample = compiles.begin(RequestKey(1), &choice(num_bytes), false);
            assert_eq!(reaches.recv(), Ok(name));
            compiles.learn(choice(num_bytes), sample);
            assert_eq!(reaches.recv(), Ok(name));
        }
    }

    #[test]
    fn a_full_queue_takes_no_further_grammar() {
        let (begun, wait) = std::sync::mpsc::channel::<()>();
        let wait = Mutex::new(wait);
        let threads = Threads { name: "stuck", count: 1, stack_bytes: 1 << 20, niceness: 0 };
        let jobs: WorkQueue<Job> = WorkQueue::start(&threads, move |_| {
            let _ = wait.lock().expect("no thread panics").recv();
        })
        .expect("a thread");
        let compiler = Compiler { jobs: jobs.sender(), large_jobs: jobs.sender() };
        // One more than wait: a thread is at the first.
        let works: Vec<_> =
            (0..MAX_WAITING_COMPILES + 2).map(|_| compiler.begin(RequestKey(1), &spec(), false)).collect();
        let is_full = |work: &Arc<dyn GrammarWork>| {
            work.progress() == GrammarProgress::Failed(RequestError::GrammarsFull)
        };
        let num_full = works.iter().filter(|work| is_full(work)).count();
        assert!((1..=2).contains(&num_full), "{num_full}");
        assert!(is_full(works.last().expect("many")));
        drop(begun);
    }
}
