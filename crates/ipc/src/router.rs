//! `EngineRouter`: several engines behind one client.
//!
//! Each engine has its own connection and I/O thread; all outputs arrive in one queue with one eventfd. A key names a
//! request independently of its engine: its upper bits are the router's, and each connection replaces them by those
//! that its engine has assigned. `router/placement.rs` chooses the engine for a request.
//!
//! With one engine, every call goes straight to its client.

pub(crate) mod placement;
pub(crate) mod prefix_table;

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
    time::{Duration, Instant},
};

use scheduler::{MetricsSnapshot, NewRequest, RequestKey};

use crate::{
    client::{
        EngineClient,
        delivery::{ClientOutput, Delivery},
        state::{ClientOptions, Counters, Health},
    },
    endpoint::Endpoint,
    error::{ClientError, EndpointError},
    handshake::facts::EngineFacts,
    key::NewKeys,
    notifier::Notifier,
    router::{placement::Placement, prefix_table::PrefixHasher},
};

/// See the module docs. Dropping it disconnects, and the engines end the requests that still run.
#[derive(Debug)]
pub struct EngineRouter {
    /// The engines by rank. A lock is held only while a pointer is copied or exchanged.
    engines: Box<[RwLock<Arc<EngineClient>>]>,
    delivery: Arc<Delivery>,
    keys: NewKeys,
    facts: EngineFacts,
    options: ClientOptions,
    /// `None` if there is one engine. The lock is held while one request is placed, which takes a look-up per block of
    /// its prompt.
    placement: Option<Mutex<Placement>>,
    hasher: PrefixHasher,
}

impl EngineRouter {
    /// Connect to all engines, in the order of their ranks, within `options.connect_timeout` in total.
    ///
    /// # Errors
    /// An engine cannot be reached, or its facts differ from the first one's.
    pub fn connect(endpoints: Vec<Endpoint>, options: ClientOptions) -> Result<Self, ClientError> {
        let began = Instant::now();
        let delivery = Delivery::new()?;
        let mut engines: Vec<Arc<EngineClient>> = Vec::with_capacity(endpoints.len());
        for (rank, endpoint) in endpoints.into_iter().enumerate() {
            let first = engines.first();
            // The rest of the time, plus a moment for engines that listen already.
            let left = options.connect_timeout.saturating_sub(began.elapsed());
            let connect_timeout = left.max(options.connect_timeout.min(Duration::from_millis(100)));
            let options = ClientOptions { connect_timeout, ..options };
            let client_index = first.map(|first| first.client_index());
            let engine = EngineClient::connect_into(endpoint, options, delivery.clone(), client_index)?;
            if let Some(first) = first {
                check_alike(rank, engine.facts(), first.facts())?;
            }
            engines.push(Arc::new(engine));
        }
        let first = engines.first().ok_or(EndpointError::NoEngine)?;
        let (client_index, facts) = (first.client_index(), first.facts().clone());
        let blocks = engines.iter().map(|engine| engine.facts().limits.num_blocks);
        let placement = (engines.len() > 1).then(|| Mutex::new(Placement::new(blocks)));
        let hasher = PrefixHasher::new(facts.limits.block_size);
        Ok(Self {
            engines: engines.into_iter().map(RwLock::new).collect(),
            delivery,
            keys: NewKeys::of(client_index),
            facts,
            options,
            placement,
            hasher,
        })
    }

    /// Replace the engine of `rank` by a restarted one. Unfinished requests of the old one end.
    ///
    /// `first_query`, a kind and a payload, is asked of the new engine and answered before it gets a request from here.
    ///
    /// # Errors
    /// There is no connection, the engine's facts differ from the others', or it does not answer the query within
    /// `timeout`. Nothing has changed then.
    pub fn reconnect(
        &self,
        rank: usize,
        endpoint: Endpoint,
        timeout: Duration,
        first_query: Option<(&str, &[u8])>,
    ) -> Result<(), ClientError> {
        self.engine(rank)?;
        let options = ClientOptions { connect_timeout: timeout, ..self.options };
        let engine =
            EngineClient::connect_into(endpoint, options, self.delivery.clone(), Some(self.client_index()))?;
        check_alike(rank, engine.facts(), &self.facts)?;
        if let Some((kind, payload)) = first_query {
            engine.query(kind, payload, timeout)?;
        }
        if let Some(mut placement) = self.placement() {
            placement.forget_prefixes(rank);
        }
        let mut engine = Arc::new(engine);
        std::mem::swap(&mut *self.engines[rank].write().unwrap_or_else(PoisonError::into_inner), &mut engine);
        engine.close_because("the engine was replaced by another");
        Ok(())
    }

    /// Give up the engine of one rank: its requests, and those sent to it later, end with `reason`. The others
    /// continue.
    ///
    /// # Errors
    /// There is no such rank.
    pub fn abandon(&self, rank: usize, reason: &str) -> Result<(), ClientError> {
        self.engine(rank)?.close_because(reason);
        Ok(())
    }

    /// Number of engines, including dead ones.
    #[must_use]
    pub fn num_engines(&self) -> usize {
        self.engines.len()
    }

    /// The current client of a rank's engine.
    ///
    /// # Errors
    /// There is no such rank.
    pub fn engine(&self, rank: usize) -> Result<Arc<EngineClient>, ClientError> {
        let num_engines = self.engines.len();
        let engine = self.engines.get(rank).ok_or(ClientError::NoSuchRank { rank, num_engines })?;
        Ok(engine.read().unwrap_or_else(PoisonError::into_inner).clone())
    }

    fn engines(&self) -> impl Iterator<Item = Arc<EngineClient>> {
        self.engines.iter().map(|engine| engine.read().unwrap_or_else(PoisonError::into_inner).clone())
    }

    /// The clients of living engines; all clients if none lives.
    fn living(&self) -> Vec<Arc<EngineClient>> {
        let living: Vec<_> = self.engines().filter(|engine| engine.is_alive()).collect();
        if living.is_empty() { self.engines().collect() } else { living }
    }

    fn placement(&self) -> Option<MutexGuard<'_, Placement>> {
        self.placement.as_ref().map(|placement| placement.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The facts of the first engine. The limits of requests are the same for all, except for the number of blocks.
    #[must_use]
    pub fn facts(&self) -> &EngineFacts {
        &self.facts
    }

    /// The number in the upper bits of this client's keys.
    #[must_use]
    pub fn client_index(&self) -> u32 {
        self.keys.client_index
    }

    /// A new key for a request.
    #[must_use]
    pub fn new_key(&self) -> RequestKey {
        self.keys.next()
    }

    /// Submit a request together with the requests that fork it. One engine takes all of them in this order, or none.
    /// The prompt is hashed, and the frame encoded, on the caller's thread.
    ///
    /// # Errors
    /// One of the requests is invalid, or no engine accepts them. Nothing was sent then.
    pub fn add_requests(&self, requests: &[NewRequest]) -> Result<(), ClientError> {
        if self.placement.is_none() || requests.is_empty() {
            return self.engine(0)?.add_requests(requests);
        }
        let names = self.hasher.names(&requests[0]);
        let engines: Vec<_> = self.engines().collect();
        let mut is_out = vec![false; engines.len()];
        let mut last_error = None;
        loop {
            let taken_in = |rank: usize| {
                let takes = !is_out[rank] && engines[rank].is_alive();
                takes.then(|| engines[rank].num_of_others())
            };
            let rank = self.placement().and_then(|mut placement| placement.place(requests, &names, taken_in));
            let Some(rank) = rank else { return Err(last_error.unwrap_or_else(|| self.no_engine())) };
            let Err(error) = engines[rank].add_requests(requests) else { return Ok(()) };
            if let Some(mut placement) = self.placement() {
                for request in requests {
                    placement.end(request.key);
                }
            }
            if !matches!(error, ClientError::Dead { .. } | ClientError::Backlogged { .. }) {
                return Err(error);
            }
            // Another engine may accept it.
            is_out[rank] = true;
            last_error = Some(error);
        }
    }

    fn no_engine(&self) -> ClientError {
        ClientError::Dead { reason: self.death().unwrap_or_else(|| "no engine takes requests".to_owned()) }
    }

    /// Abort requests; each gets a last output. Keys of finished requests and of other clients' requests are ignored.
    pub fn abort_keys(&self, keys: Vec<RequestKey>) {
        self.by_engine(keys, EngineClient::abort_keys);
    }

    /// Sort keys by engine, and call `give` for each engine with its own.
    fn by_engine(&self, keys: Vec<RequestKey>, give: fn(&EngineClient, Vec<RequestKey>)) {
        let Some(placement) = self.placement() else {
            return self.engines().for_each(|engine| give(&engine, keys.clone()));
        };
        let mut by_rank = vec![Vec::new(); self.num_engines()];
        for key in keys {
            if let Some(rank) = placement.rank_of(key) {
                by_rank[rank].push(key);
            }
        }
        drop(placement);
        for (engine, keys) in self.engines().zip(by_rank) {
            if !keys.is_empty() {
                give(&engine, keys);
            }
        }
    }

    /// Abort requests by their ids; unknown and finished ones are ignored.
    pub fn abort_requests<'a>(&self, request_ids: impl IntoIterator<Item = &'a str>) {
        let Some(placement) = self.placement() else {
            if let Ok(engine) = self.engine(0) {
                engine.abort_requests(request_ids);
            }
            return;
        };
        let keys = request_ids.into_iter().filter_map(|request_id| placement.key_of_id(request_id)).collect();
        drop(placement);
        self.abort_keys(keys);
    }

    /// End requests whose text has reached a stop string; they count as complete.
    pub fn stop_keys(&self, keys: Vec<RequestKey>) {
        self.by_engine(keys, EngineClient::stop_keys);
    }

    /// Report why a request ended whose last output left that open: at a stop string, or for the engine's own reason. Call this
    /// while [`Self::drain_outputs`] passes on that output; afterwards the router has forgotten which engine had the
    /// request.
    pub fn settle_end(&self, key: RequestKey, found_stop: bool) {
        if let Some(engine) = self.engine_of(key) {
            engine.settle_end(key, found_stop);
        }
    }

    /// Report that the grammar of a request is compiled, so that the request may run.
    pub fn grammar_ready(&self, key: RequestKey) {
        if let Some(engine) = self.engine_of(key) {
            engine.grammar_ready(key);
        }
    }

    /// Report that the grammar of a request cannot be compiled; the request ends with an error.
    pub fn grammar_failed(&self, key: RequestKey) {
        if let Some(engine) = self.engine_of(key) {
            engine.grammar_failed(key);
        }
    }

    fn engine_of(&self, key: RequestKey) -> Option<Arc<EngineClient>> {
        let rank = match self.placement() {
            None => 0,
            Some(placement) => placement.rank_of(key)?,
        };
        self.engine(rank).ok()
    }

    /// Take all outputs that have arrived, oldest first. Call it from one thread at a time; otherwise each thread gets
    /// only a part.
    pub fn drain_outputs(&self, mut receive: impl FnMut(ClientOutput)) {
        if self.placement.is_none() {
            return self.delivery.drain(receive);
        }
        let mut ended = Vec::new();
        self.delivery.drain(|output| {
            if output.is_last() {
                ended.push(output.key());
            }
            receive(output);
        });
        if !ended.is_empty()
            && let Some(mut placement) = self.placement()
        {
            for key in ended {
                placement.end(key);
            }
        }
    }

    /// The notifier; its eventfd is readable while outputs of any engine wait.
    #[must_use]
    pub fn notifier(&self) -> &Notifier {
        &self.delivery.notifier
    }

    /// The sum of the living engines' counters as of their last heartbeats.
    #[must_use]
    pub fn stats(&self) -> Counters {
        sum(self.living().iter().map(|engine| engine.stats()))
    }

    /// Ask for the living engines' current counters and add them up; after `timeout`, use the last known ones.
    #[must_use]
    pub fn fresh_stats(&self, timeout: Duration) -> Counters {
        let deadline = Instant::now() + timeout;
        let asked: Vec<_> = self.living().into_iter().map(|engine| (engine.query_stats(), engine)).collect();
        sum(asked.into_iter().map(|(answer, engine)| {
            let left = deadline.saturating_duration_since(Instant::now());
            answer.recv_timeout(left).unwrap_or_else(|_| engine.stats())
        }))
    }

    /// The metrics of each engine, by rank; `None` for an engine that is gone or does not answer within `timeout`.
    #[must_use]
    pub fn metrics(&self, timeout: Duration) -> Vec<Option<MetricsSnapshot>> {
        let deadline = Instant::now() + timeout;
        let asked: Vec<_> = self.engines().map(|engine| engine.query_metrics()).collect();
        let left = || deadline.saturating_duration_since(Instant::now());
        asked.into_iter().map(|answer| answer.recv_timeout(left()).ok()).collect()
    }

    /// The oldest heartbeat and the longest pause among the living engines, and the sum of their steps.
    #[must_use]
    pub fn health(&self) -> Health {
        let worst = |a: Health, b: Health| Health {
            heartbeat_age: a.heartbeat_age.max(b.heartbeat_age),
            step_age: a.step_age.max(b.step_age),
            num_steps: a.num_steps.saturating_add(b.num_steps),
        };
        let none = Health { heartbeat_age: Duration::ZERO, step_age: Duration::ZERO, num_steps: 0 };
        self.living().iter().map(|engine| engine.health()).fold(none, worst)
    }

    /// Whether any engine is connected.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.engines().any(|engine| engine.is_alive())
    }

    /// The error of the last failed step, in any engine, that ended requests of this client.
    #[must_use]
    pub fn last_step_error(&self) -> Option<Arc<str>> {
        self.delivery.last_step_error()
    }

    /// Why no engine is connected; `None` while one is.
    #[must_use]
    pub fn death(&self) -> Option<String> {
        let deaths: Option<Vec<String>> =
            self.engines().map(|engine| engine.death().map(ToOwned::to_owned)).collect();
        let mut deaths = deaths?;
        if deaths.len() == 1 {
            return deaths.pop();
        }
        let each = deaths.iter().enumerate().map(|(rank, reason)| format!("rank {rank}: {reason}"));
        Some(format!("no engine is alive: {}", each.collect::<Vec<_>>().join("; ")))
    }

    /// Disconnect; running requests get their last output. Idempotent.
    pub fn close(&self) {
        self.engines().for_each(|engine| engine.close());
    }
}

/// # Errors
/// The engine differs from the first one in a number that a front end assumes to be the same for all.
fn check_alike(rank: usize, engine: &EngineFacts, first: &EngineFacts) -> Result<(), ClientError> {
    let numbers = [
        ("max_model_len", engine.limits.max_model_len, first.limits.max_model_len),
        ("block_size", engine.limits.block_size, first.limits.block_size),
    ];
    match numbers.into_iter().find(|(_, got, expected)| got != expected) {
        None => Ok(()),
        Some((what, got, expected)) => Err(ClientError::NotAlike { rank, what, got, expected }),
    }
}

/// Add up counters of the same name, in the order of the first engine that has any.
fn sum(each: impl Iterator<Item = Counters>) -> Counters {
    // An engine that has not answered yet has no counters.
    let add = |mut total: Counters, counters: Counters| {
        let entries = Arc::make_mut(&mut total);
        for (at, (name, value)) in counters.iter().enumerate() {
            // All engines run the same program, so the names are mostly in the same places.
            let is_at = entries.get(at).is_some_and(|(own, _)| own == name);
            let found = if is_at { Some(at) } else { entries.iter().position(|(own, _)| own == name) };
            match found {
                Some(found) => entries[found].1 = entries[found].1.saturating_add(*value),
                None => entries.push((name.clone(), *value)),
            }
        }
        total
    };
    each.reduce(add).unwrap_or_default()
}
