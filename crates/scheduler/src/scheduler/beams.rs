//! Beams: the requests of one search, which advance in lock-step and share the blocks of their common beginning.
//!
//! A search is submitted as a request and its forks, one request per beam. Its results leave as the outputs of these
//! requests; the first gets the best. Only the *leader* waits in the queue. It is admitted when there are rows for all
//! beams, and computes the prompt. Its candidates become the first beams: the *followers* share the leader's blocks,
//! and from then on each is a running request. A step gives candidates for each beam. When all beams have theirs, the
//! search chooses (`beam_search.rs`), and each beam becomes the continuation that was chosen for its place: it shares
//! the blocks of its parent and drops its own. A block with several holders is copied for the next beam that writes to
//! it; the last holder needs no copy.
//!
//! If one beam must give up its blocks, all beams of its search do. The leader waits again. When it has its candidates
//! again, the followers share what they have in common with it and compute the rest.

use kvblocks::BlockId;

use super::Scheduler;
use crate::{
    logprobs::{LogprobRows, TokenLogprobs},
    output::{FinishReason, RequestError},
    request::RequestStatus,
    scheduler::beam_search::{BeamSearch, BeamToken, Candidates, Continuation, Hypothesis, Round, Seat},
    step::{Entry, token_rows::TokenRows},
};

/// The state of a beam in addition to its request.
#[derive(Debug, Default)]
struct Member {
    slot: u32,
    /// The candidates from its last step.
    candidates: Option<Candidates>,
    /// Index of its first block that the worker does not know; `Some(0)`: it does not know the row either.
    unknown_from: Option<u32>,
    /// Whether the worker knows its row.
    is_known: bool,
}

/// The beams of a search.
#[derive(Debug)]
struct Group {
    members: Vec<Member>,
    search: BeamSearch,
    /// Rows that are reserved for the followers.
    rows: Vec<u32>,
    /// Whether the followers are running, or were and must run again.
    is_spread: bool,
}

/// All searches in progress.
#[derive(Debug, Default)]
pub(crate) struct Beams {
    groups: Vec<Option<Group>>,
}

impl Beams {
    fn get(&self, seat: Seat) -> Option<&Group> {
        self.groups.get(seat.group as usize)?.as_ref()
    }

    fn get_mut(&mut self, seat: Seat) -> Option<&mut Group> {
        self.groups.get_mut(seat.group as usize)?.as_mut()
    }

    fn insert(&mut self, group: Group) -> u32 {
        let free = self.groups.iter().position(Option::is_none);
        let index = free.unwrap_or(self.groups.len());
        if index == self.groups.len() {
            self.groups.push(None);
        }
        self.groups[index] = Some(group);
        index as u32
    }

    fn remove(&mut self, seat: Seat) -> Option<Group> {
        self.groups.get_mut(seat.group as usize)?.take()
    }

    /// Rows that are reserved for followers.
    pub(crate) fn kept_rows(&self) -> impl Iterator<Item = u32> + '_ {
        self.groups.iter().flatten().flat_map(|group| group.rows.iter().copied())
    }

    /// Slots of all beams.
    pub(crate) fn slots(&self) -> impl Iterator<Item = u32> + '_ {
        self.groups.iter().flatten().flat_map(|group| group.members.iter().map(|member| member.slot))
    }
}

impl Scheduler {
    /// Make a search from requests that have just arrived, the leader's first.
    pub(crate) fn begin_search(&mut self, slots: &[u32]) {
        let leader = &self.requests[slots[0] as usize];
        let params = &leader.cold.params;
        let ends = params.eos_token_id.into_iter().chain(params.stop_token_ids.iter().copied());
        let max_tokens = leader.cold.search_limit - leader.cold.num_prompt_tokens;
        let search = BeamSearch::new(slots.len() as u32, params.length_penalty, max_tokens, ends.collect());
        let members = slots.iter().map(|&slot| Member { slot, ..Member::default() }).collect();
        let group = self.beams.insert(Group { members, search, rows: Vec::new(), is_spread: false });
        for (place, &slot) in (0..).zip(slots) {
            self.requests[slot as usize].cold.seat = Some(Seat { group, place });
        }
    }

    /// Number of rows that a waiting request needs at its admission.
    pub(crate) fn num_rows_needed(&self, slot: u32) -> usize {
        let seat = self.requests[slot as usize].cold.seat;
        seat.and_then(|seat| self.beams.get(seat)).map_or(1, |group| group.members.len())
    }

    /// Number of tokens whose blocks must be free at the admission of a waiting request; for a search, those of all
    /// beams.
    pub(crate) fn full_sequence_tokens(&self, slot: u32) -> u32 {
        let request = &self.requests[slot as usize];
        let full = request.num_tokens.min(self.config.max_model_len);
        let num_followers = self.num_rows_needed(slot) as u32 - 1;
        if num_followers == 0 {
            return full;
        }
        let num_outputs = request.num_tokens - request.cold.num_prompt_tokens;
        // Each beam has its own output, and copies the block in which the prompt ends.
        let own = num_outputs.next_multiple_of(self.config.block_size) + self.config.block_size;
        full.next_multiple_of(self.config.block_size).saturating_add(num_followers.saturating_mul(own))
    }

    /// Reserve rows for the followers of a leader that was admitted.
    pub(crate) fn keep_rows(&mut self, slot: u32) {
        let Some(seat) = self.requests[slot as usize].cold.seat else { return };
        let Some(group) = self.beams.get_mut(seat) else { return };
        group.rows = (1..group.members.len()).map(|_| self.rows.take()).collect();
        group.members[0].is_known = true;
        group.members[0].unknown_from = None;
    }

    /// Whether no beam of a waiting leader's search is in a step in flight.
    pub(crate) fn beams_are_settled(&self, slot: u32) -> bool {
        let Some(group) = self.requests[slot as usize].cold.seat.and_then(|seat| self.beams.get(seat)) else {
            return true;
        };
        group.members.iter().all(|member| self.requests[member.slot as usize].num_steps_in_flight == 0)
    }

    /// The request that represents `slot` where requests are compared: its leader, or itself.
    pub(crate) fn leader_of(&self, slot: u32) -> u32 {
        let seat = self.requests[slot as usize].cold.seat;
        seat.and_then(|seat| self.beams.get(seat)).map_or(slot, |group| group.members[0].slot)
    }

    /// Make sure that a beam alone holds the block that it writes to next, by copying a shared one. Returns `false`,
    /// with nothing changed, if there are too few blocks for that and for its positions up to `end`.
    pub(crate) fn own_next_block(&mut self, slot: u32, end: u32) -> bool {
        let request = &mut self.requests[slot as usize];
        let Some(seat) = request.cold.seat else { return true };
        let block_size = self.config.block_size;
        let index = (request.num_computed_tokens / block_size) as usize;
        let Some(&block) = request.block_table.get(index) else { return true };
        if self.kv.pool.ref_count(block) < 2 {
            return true;
        }
        let more = end.div_ceil(block_size).saturating_sub(request.block_table.len() as u32);
        if more + 1 > self.kv.pool.num_free() {
            return false;
        }
        let Some(copy) = self.kv.pool.allocate_one() else { return false };
        self.kv.cpu.copy(block, copy);
        self.kv.pool.free(block);
        request.block_table[index] = copy;
        self.stats.num_beam_copies += 1;
        if let Some(group) = self.beams.get_mut(seat) {
            note_unknown(&mut group.members[seat.place as usize], index as u32);
        }
        true
    }

    /// Whether the arrays of the step being planned have room for everything that the worker may have to learn about a
    /// running request; if not, it runs in a later step.
    pub(crate) fn can_tell_worker(&self, set: usize, slot: u32) -> bool {
        let request = &self.requests[slot as usize];
        let Some(group) = request.cold.seat.and_then(|seat| self.beams.get(seat)) else { return true };
        let has_news =
            group.members.iter().any(|member| member.slot == slot && member.unknown_from.is_some());
        // The rows after this one may need any block of the pool.
        let num_usable = self.config.num_blocks as usize;
        let num_stop_ids = request.cold.params.stop_token_ids.len() + 1;
        !has_news || self.steps[set].has_room_with(request.block_table.len() + 1, num_usable, num_stop_ids)
    }

    /// What the worker must learn about a running request that is being scheduled: its first new block, and whether its
    /// row is new.
    pub(crate) fn take_news(&mut self, slot: u32) -> (Option<u32>, bool) {
        let Some(seat) = self.requests[slot as usize].cold.seat else { return (None, false) };
        let Some(group) = self.beams.get_mut(seat) else { return (None, false) };
        let member = &mut group.members[seat.place as usize];
        (member.unknown_from.take(), !std::mem::replace(&mut member.is_known, true))
    }

    /// Process a sampled row of a beam. Returns how many requests ended with it.
    pub(crate) fn take_candidates(
        &mut self,
        entry: &Entry,
        sample: usize,
        sampled: TokenRows<'_>,
        logprobs: LogprobRows<'_>,
        now: u64,
    ) -> usize {
        let slot = entry.tenant.slot;
        let request = &mut self.requests[slot as usize];
        let Some(seat) = request.cold.seat else { return 0 };
        if request.status != RequestStatus::Running {
            return 0; // It lost its blocks meanwhile: it is computed again, and all the others with it.
        }
        request.num_expected_tokens = request.num_tokens;
        let given = logprobs.find(request.key, sample * sampled.num_columns);
        let Some(given) = given.filter(|_| sampled.first(sample) >= 0) else {
            return self.fail_search(slot, now);
        };
        let Some(group) = self.beams.get_mut(seat) else { return 0 };
        let is_leader = seat.place == 0;
        // The first entry is the sampled token, which is also among the others.
        group.members[seat.place as usize].candidates = Some(given.entries[1..].to_vec());
        if is_leader && group.is_spread && !group.rows.is_empty() {
            self.spread_again(seat);
        }
        let Some(group) = self.beams.get_mut(seat) else { return 0 };
        let num_beams = group.search.num_beams();
        if group.members[..num_beams].iter().any(|member| member.candidates.is_none()) {
            return 0;
        }
        self.choose_beams(seat, num_beams, now)
    }

    /// Choose the next beams, when all beams of a search have candidates.
    fn choose_beams(&mut self, seat: Seat, num_beams: usize, now: u64) -> usize {
        let requests = &self.requests;
        let Some(group) = self.beams.get_mut(seat) else { return 0 };
        let candidates: Vec<Candidates> = group.members[..num_beams]
            .iter_mut()
            .map(|member| member.candidates.take().unwrap_or_default())
            .collect();
        let members = &group.members;
        let output_of = |place: usize| {
            let request = &requests[members[place].slot as usize];
            let start = request.cold.num_prompt_tokens;
            let mut output = vec![0; (request.num_tokens - start) as usize];
            request.copy_tokens(start as usize, &mut output);
            output
        };
        match group.search.advance(&candidates, output_of) {
            Round::GoOn(continuations) => {
                self.go_on(seat, &continuations);
                0
            }
            Round::Over => self.end_search(seat, now),
            Round::Stuck => {
                let leader = group.members[0].slot;
                self.fail_search(leader, now)
            }
        }
    }

    /// Turn each beam into the continuation that was chosen for its place.
    fn go_on(&mut self, seat: Seat, continuations: &[Continuation]) {
        let Some(group) = self.beams.get_mut(seat) else { return };
        let slots: Vec<u32> = group.members.iter().map(|member| member.slot).collect();
        let is_first = !std::mem::replace(&mut group.is_spread, true);
        for (place, continuation) in continuations.iter().enumerate() {
            if continuation.parent != place {
                // A parent keeps its place with its first child, so its request has not changed yet.
                self.become_copy(seat, place, slots[place], slots[continuation.parent]);
            }
        }
        if is_first {
            for place in 1..slots.len() {
                self.seat_follower(seat, place);
            }
        }
        for (&slot, continuation) in slots.iter().zip(continuations) {
            let request = &mut self.requests[slot as usize];
            request.push_token(continuation.token_id);
            request.num_expected_tokens = request.num_tokens;
            request.max_total_tokens = request.num_tokens + 1;
            // Planning the next token checks whether others hold the block.
            request.slots_left = 0;
        }
    }

    /// Turn a beam into a copy of another: it shares that one's blocks and computed tokens.
    fn become_copy(&mut self, seat: Seat, place: usize, slot: u32, parent_slot: u32) {
        self.requests[parent_slot as usize].gather_tokens();
        let parent = &self.requests[parent_slot as usize];
        let tokens = parent.gathered_tokens().to_vec();
        let table = parent.block_table.clone();
        let hashes = parent.cold.block_hashes.clone();
        let (num_computed, num_registered) = (parent.num_computed_tokens, parent.num_registered_blocks);
        for &block in &table {
            self.kv.pool.touch(block);
        }
        let request = &mut self.requests[slot as usize];
        let num_common = request.block_table.iter().zip(&table).take_while(|(a, b)| a == b).count();
        for block in std::mem::take(&mut request.block_table).into_iter().rev() {
            self.kv.pool.free(block);
        }
        if let Some(group) = self.beams.get_mut(seat)
            && num_common < table.len()
        {
            note_unknown(&mut group.members[place], num_common as u32);
        }
        request.set_tokens(tokens);
        request.block_table = table;
        request.cold.block_hashes = hashes;
        request.num_computed_tokens = num_computed;
        request.num_registered_blocks = num_registered;
        request.slots_left = 0;
    }

    /// Start a follower, after the beams before it.
    fn seat_follower(&mut self, seat: Seat, place: usize) {
        let Some(group) = self.beams.get_mut(seat) else { return };
        let (slot, before) = (group.members[place].slot, group.members[place - 1].slot);
        let leader = group.members[0].slot;
        let Some(row) = group.rows.pop() else { return };
        group.members[place].is_known = false;
        group.members[place].unknown_from = Some(0);
        let (first_scheduled_ns, immune_until) = {
            let cold = &self.requests[leader as usize].cold;
            (cold.first_scheduled_ns, cold.immune_until)
        };
        let request = &mut self.requests[slot as usize];
        request.row = row;
        request.status = RequestStatus::Running;
        request.cold.immune_until = immune_until;
        if request.cold.first_scheduled_ns == 0 {
            request.cold.first_scheduled_ns = first_scheduled_ns;
            request.cold.num_prompt_tokens_skipped = request.cold.num_prompt_tokens;
        }
        let index = self.running.iter().position(|&other| other == before);
        self.running.insert(index.map_or(self.running.len(), |index| index + 1), slot);
        self.note(slot);
    }

    /// The leader of a search that had lost its blocks has caught up: the followers share what they have in common with
    /// it, or what the prefix cache has, if that is more.
    fn spread_again(&mut self, seat: Seat) {
        let Some(group) = self.beams.get(seat) else { return };
        let slots: Vec<u32> = group.members.iter().map(|member| member.slot).collect();
        let block_size = self.config.block_size;
        let mut hits = std::mem::take(&mut self.hits);
        self.requests[slots[0] as usize].gather_tokens();
        for (place, &slot) in slots.iter().enumerate().skip(1) {
            self.requests[slot as usize].gather_tokens();
            let (leader, request) = (&self.requests[slots[0] as usize], &self.requests[slot as usize]);
            let pairs = leader.gathered_tokens().iter().zip(request.gathered_tokens());
            let num_common = pairs.take_while(|(a, b)| a == b).count() as u32;
            // Whole blocks only, and at least one token must be left to compute.
            let num_blocks = num_common.min(request.num_tokens - 1) / block_size;
            let shared: Vec<BlockId> = leader.block_table[..num_blocks as usize].to_vec();
            let num_registered = leader.num_registered_blocks.min(num_blocks);
            let request = &mut self.requests[slot as usize];
            self.kv.longest_cache_hit(request, request.num_tokens - 1, &mut hits);
            let is_longer = hits.len() > shared.len();
            let blocks = if is_longer { &hits } else { &shared };
            for &block in blocks {
                self.kv.pool.touch(block);
            }
            request.block_table.extend_from_slice(blocks);
            request.num_computed_tokens = blocks.len() as u32 * block_size;
            request.num_registered_blocks = if is_longer { hits.len() as u32 } else { num_registered };
            request.slots_left = 0;
            self.seat_follower(seat, place);
        }
        hits.clear();
        self.hits = hits;
    }

    /// The running beams of a victim's search, all of which give up their blocks; `None` if it belongs to no search.
    pub(crate) fn running_beams(&self, victim: u32) -> Option<Vec<u32>> {
        let group = self.beams.get(self.requests[victim as usize].cold.seat?)?;
        let runs = |&slot: &u32| self.requests[slot as usize].status == RequestStatus::Running;
        Some(group.members.iter().map(|member| member.slot).filter(runs).collect())
    }

    /// Take the blocks of a search's beams, which have left the running list and are not in the step being planned. The
    /// leader waits for all of them.
    pub(crate) fn preempt_search(&mut self, slots: &[u32]) {
        let Some(seat) = self.requests[slots[0] as usize].cold.seat else { return };
        for &slot in slots {
            for &block in &self.requests[slot as usize].block_table {
                // A block that was copied to in this step has one holder.
                if self.kv.pool.ref_count(block) == 1 {
                    self.kv.cpu.cancel_copies_to(block);
                }
            }
        }
        for &slot in slots.iter().rev() {
            let cold = &mut self.requests[slot as usize].cold;
            cold.num_preemptions += 1;
            self.stats.num_preemptions += 1;
            self.forget_computed(slot);
        }
        let newest = self.steps.newest_in_flight();
        let Some(group) = self.beams.get_mut(seat) else { return };
        for row in std::mem::take(&mut group.rows) {
            self.rows.give_up(row, newest);
        }
        for member in &mut group.members {
            member.candidates = None;
            member.unknown_from = None;
            member.is_known = false;
        }
        let leader = group.members[0].slot;
        self.waiting.push(leader, &self.requests[leader as usize]);
    }

    /// End a search whose best beams are known: each request gets one, the first request the best. Returns how many
    /// requests ended.
    fn end_search(&mut self, seat: Seat, now: u64) -> usize {
        let Some(group) = self.beams.get_mut(seat) else { return 0 };
        let ended = group.search.take_ended();
        let slots = self.disband(seat);
        for (index, &slot) in slots.iter().enumerate() {
            let status = if let Some(hypothesis) = ended.get(index) {
                self.emit_beam(slot, hypothesis, now)
            } else {
                // The vocabulary is too small for so many beams.
                self.emit(slot, -1, Some(FinishReason::Error), -1, RequestError::NoToken, now);
                RequestStatus::FinishedError
            };
            self.release(slot, status);
            self.requests.free(slot);
        }
        slots.len()
    }

    /// Emit the result of a request of a search.
    fn emit_beam(&mut self, slot: u32, hypothesis: &Hypothesis, now: u64) -> RequestStatus {
        let request = &mut self.requests[slot as usize];
        let mut tokens = vec![0; request.cold.num_prompt_tokens as usize];
        request.copy_tokens(0, &mut tokens);
        tokens.extend_from_slice(&hypothesis.token_ids);
        request.set_tokens(tokens);
        let key = request.key;
        let eos_token_id = request.eos_token_id;
        let last = hypothesis.token_ids.len() - 1;
        for (index, (&token_id, &BeamToken { logprob, rank })) in
            hypothesis.token_ids.iter().zip(&hypothesis.tokens).enumerate()
        {
            let entries = Box::new([(token_id, logprob)]);
            self.outgoing.push_logprobs(TokenLogprobs { key, rank, entries });
            self.record_token(slot, token_id, now);
            let reason = if hypothesis.is_stopped { FinishReason::Stop } else { FinishReason::Length };
            let is_stop_id = hypothesis.is_stopped && index == last && token_id != eos_token_id;
            let stop_reason = if is_stop_id { token_id } else { -1 };
            self.emit(
                slot,
                token_id,
                (index == last).then_some(reason),
                stop_reason,
                RequestError::None,
                now,
            );
        }
        if hypothesis.is_stopped {
            RequestStatus::FinishedStopped
        } else {
            RequestStatus::FinishedLengthCapped
        }
    }

    /// End a search whose logits are not numbers. Returns how many requests ended.
    fn fail_search(&mut self, slot: u32, now: u64) -> usize {
        let Some(seat) = self.requests[slot as usize].cold.seat else { return 0 };
        let slots = self.disband(seat);
        for &slot in &slots {
            // The KV is as invalid as the logits: no request may find it.
            self.kv.forget(&mut self.requests[slot as usize]);
            self.emit(slot, -1, Some(FinishReason::Error), -1, RequestError::NoToken, now);
            self.release(slot, RequestStatus::FinishedError);
            self.requests.free(slot);
        }
        slots.len()
    }

    /// End the search of a request that is about to leave; all its requests must leave too. `None` if it belongs to no
    /// search.
    pub(crate) fn disband_with(&mut self, slot: u32) -> Option<Vec<u32>> {
        let seat = self.requests[slot as usize].cold.seat?;
        self.beams.get(seat)?;
        Some(self.disband(seat))
    }

    fn disband(&mut self, seat: Seat) -> Vec<u32> {
        let Some(group) = self.beams.remove(seat) else { return Vec::new() };
        let newest = self.steps.newest_in_flight();
        for row in group.rows {
            self.rows.give_up(row, newest);
        }
        group.members.iter().map(|member| member.slot).collect()
    }

    /// Beams that wait with their leader, or for it; they are in no queue.
    pub(crate) fn parked_beams(&self) -> impl Iterator<Item = u32> + '_ {
        self.beams.slots().filter(|&slot| {
            let request = &self.requests[slot as usize];
            request.status != RequestStatus::Running && request.cold.is_follower
        })
    }
}

/// Note that the worker does not know the blocks from `index` on.
fn note_unknown(member: &mut Member, index: u32) {
    member.unknown_from = Some(member.unknown_from.map_or(index, |from| from.min(index)));
}
