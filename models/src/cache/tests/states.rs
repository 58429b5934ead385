//! Kept states: a sequence finds the keys and the states of its own tokens, whatever was kept, copied, and taken back
//! before.

use super::*;
use crate::cache::states::Boundary;
use std::ops::Range;

/// A sequence that is sampled: its last token has not been run.
struct Live {
    table: BlockTable,
    tokens: Vec<u32>,
}

/// A cache that holds tokens in place of numbers: in each slot of a block the one whose keys and values would be there,
/// in each slot of states all those that would have made them.
struct Shadow {
    cache: KvCache,
    blocks: Vec<[u32; BLOCK_SIZE]>,
    states: Vec<Vec<u32>>,
    live: Vec<Live>,
    /// Tokens that were run before, and may begin a prompt.
    earlier: Vec<Vec<u32>>,
    found: usize,
}

const NOTHING: u32 = 1000;

impl Shadow {
    fn new(blocks: usize, slots: usize) -> Self {
        let mut cache = cache("qwen3_5_text", blocks);
        cache.grow_states(slots);
        cache.keep_contents(true);
        Self {
            cache,
            blocks: vec![[NOTHING; BLOCK_SIZE]; blocks],
            states: Vec::new(),
            live: Vec::new(),
            earlier: Vec::new(),
            found: 0,
        }
    }

    /// Copies of a forward pass before it runs.
    fn copy(&mut self) {
        let slots = self.cache.slots.as_mut().expect("linear attention");
        self.states.resize(slots.len(), Vec::new());
        let copies = slots.take_copies();
        let read = copies.iter().map(|&(source, _)| self.states[source as usize].clone());
        let read: Vec<Vec<u32>> = read.collect();
        for ((_, target), state) in copies.into_iter().zip(read) {
            self.states[target as usize] = state;
        }
        let group = &mut self.cache.groups[0];
        let copies = std::mem::take(&mut group.copies);
        for &(source, target) in &copies {
            let chained = copies.iter().any(|&(other, _)| other == target);
            assert!(!chained, "a copy of a copy");
            let writers = copies.iter().filter(|(_, other)| *other == target);
            assert_eq!(writers.count(), 1, "two copies to a block");
            self.blocks[target as usize] = self.blocks[source as usize];
            group.pool.release(source);
        }
    }

    /// Runs some tokens of a sequence: those before them have to be where it reads them.
    fn forward(&mut self, table: &BlockTable, tokens: &[u32], run: Range<usize>) {
        self.copy();
        let place = |at: usize| (table.groups[0].block(at / BLOCK_SIZE), at % BLOCK_SIZE);
        for at in run.clone() {
            let (block, slot) = place(at);
            self.blocks[block as usize][slot] = tokens[at];
        }
        for (at, &token) in tokens.iter().enumerate().take(run.start) {
            let (block, slot) = place(at);
            assert_eq!(self.blocks[block as usize][slot], token, "key of {at}");
        }
        let state = &mut self.states[table.state.expect("a slot") as usize];
        if run.start > 0 {
            assert_eq!(*state, tokens[..run.start], "states");
        }
        *state = tokens[..run.end].to_vec();
    }

    /// Begins a sequence as the sampling engine does, in chunks; false where the pool has no room for it.
    fn begin(&mut self, tokens: &[u32], is_prompt: bool) -> bool {
        let kept = self.cache.kept_tokens(tokens);
        let expected = self.cache.found_tokens(tokens);
        let shares = is_prompt && self.cache.may_share_states();
        let mut table = self.cache.begin(tokens);
        assert_eq!(table.tokens(), expected);
        self.found += expected;
        let split = Some(kept).filter(|&kept| shares && kept > table.tokens());
        for end in [split, Some(tokens.len())].into_iter().flatten() {
            let from = table.tokens();
            if !self.cache.append(&mut table, end - from) {
                self.cache.free(table);
                return false;
            }
            self.cache.keep_prefix(&mut table, &tokens[..end]);
            self.forward(&table, tokens, from..end);
            let at = if Some(end) == split { Boundary::Shared } else { Boundary::Prompt };
            if is_prompt {
                self.cache.save_states(&mut table, &tokens[..end], at);
            }
        }
        let tokens = [tokens, &[7]].concat();
        self.live.push(Live { table, tokens });
        true
    }

    /// Runs the last token of a sequence; false where the pool has no room for it.
    fn run_last(&mut self, index: usize) -> bool {
        let mut live = self.live.swap_remove(index);
        let last = live.tokens.len() - 1;
        let room = self.cache.append(&mut live.table, 1);
        if room {
            self.forward(&live.table, &live.tokens, last..last + 1);
        }
        self.live.push(live);
        room
    }

    fn preempt(&mut self, index: usize) {
        let mut live = self.live.swap_remove(index);
        let ran = &live.tokens[..live.tokens.len() - 1];
        self.cache.keep_prefix(&mut live.table, ran);
        self.cache.free(live.table);
        self.earlier.push(live.tokens);
    }

    /// Ends a turn, whose last token may have been run already; answers are short.
    fn end(&mut self, index: usize, at: Boundary, overrun: bool) {
        if overrun && !self.run_last(index) {
            return self.preempt(index);
        }
        // running a token moves its sequence to the end
        let index = if overrun { self.live.len() - 1 } else { index };
        let mut live = self.live.swap_remove(index);
        let ran = live.tokens[..live.table.tokens()].to_vec();
        self.cache.save_states(&mut live.table, &ran, at);
        self.cache.free(live.table);
        self.earlier.push([&live.tokens[..], &[3, 4]].concat());
    }

    fn check(&self) {
        let slots = self.cache.slots.as_ref().expect("linear attention");
        let mut used: Vec<u32> = self.live.iter().filter_map(|l| l.table.state).collect();
        used.sort_unstable();
        used.dedup();
        assert_eq!(used.len(), self.live.len(), "a slot for each sequence");
        assert_eq!(slots.used(), used.len());
        let group = &self.cache.groups[0];
        let mut references = vec![0; group.pool.len()];
        let tables = self.live.iter().flat_map(|l| &l.table.groups[0].blocks);
        let sources = group.copies.iter().map(|(source, _)| source);
        for &block in tables.chain(sources) {
            references[block as usize] += 1;
        }
        let counted = (0..group.pool.len() as u32).map(|b| group.pool.references(b));
        assert!(counted.eq(references));
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// A number of tokens that all prompts may begin with, then a number of one of three kinds.
    Prompt(usize, usize, u32),
    /// The tokens that an earlier sequence ended with.
    Again(usize, bool),
    Decode,
    Fork(usize),
    Preempt(usize),
    End(usize, bool, bool),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0_usize..40, 1_usize..24, 1_u32..4).prop_map(|(a, b, salt)| Step::Prompt(a, b, salt)),
        2 => (any::<usize>(), any::<bool>()).prop_map(|(i, prompt)| Step::Again(i, prompt)),
        4 => Just(Step::Decode),
        1 => any::<usize>().prop_map(Step::Fork),
        1 => any::<usize>().prop_map(Step::Preempt),
        3 => (any::<usize>(), any::<bool>(), any::<bool>()).prop_map(|(i, turn, over)| Step::End(i, turn, over)),
    ];
    prop::collection::vec(step, 1..80)
}

/// Decodes a token of every sequence; the youngest give up their blocks where others have none.
fn decode(shadow: &mut Shadow) {
    for _ in 0..shadow.live.len() {
        if shadow.live.is_empty() {
            return;
        }
        if shadow.run_last(0) {
            let Some(live) = shadow.live.last_mut() else {
                return;
            };
            live.tokens.push((live.tokens.len() % 3) as u32);
        } else {
            let youngest = shadow.live.len() - 1;
            shadow.preempt(youngest);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// The shadow checks it at every forward pass.
    #[test]
    fn a_sequence_finds_the_keys_and_states_of_its_own_tokens(
        steps in steps(), blocks in 5_usize..60, slots in 1_usize..12, keeps in any::<bool>()
    ) {
        let mut shadow = Shadow::new(blocks, slots);
        shadow.cache.keep_contents(keeps);
        for step in steps {
            let live = shadow.live.len();
            match step {
                Step::Prompt(common, unique, salt) => {
                    shadow.begin(&[tokens(common, 0), tokens(unique, salt)].concat(), true);
                }
                Step::Again(i, is_prompt) if !shadow.earlier.is_empty() => {
                    let i = i % shadow.earlier.len();
                    let again = shadow.earlier.swap_remove(i);
                    if again.len() < 4 * BLOCK_SIZE {
                        shadow.begin(&again, is_prompt);
                    }
                }
                Step::Decode => decode(&mut shadow),
                Step::Fork(i) if live > 0 => {
                    let sequence = &mut shadow.live[i % live];
                    let table = shadow.cache.fork(&mut sequence.table);
                    let mut tokens = sequence.tokens.clone();
                    tokens.pop();
                    tokens.push(8);
                    shadow.live.push(Live { table, tokens });
                }
                Step::Preempt(i) if live > 0 => shadow.preempt(i % live),
                Step::End(i, turn, overrun) if live > 0 => {
                    let at = if turn { Boundary::Turn } else { Boundary::Ended };
                    shadow.end(i % live, at, overrun);
                }
                _ => {}
            }
            shadow.check();
        }
        for _ in 0..shadow.live.len() {
            shadow.preempt(0);
        }
        shadow.copy();
        shadow.check();
        prop_assert_eq!((shadow.cache.used_blocks(), shadow.cache.used_bytes()), (0, 0));
    }
}

#[test]
fn the_third_prompt_begins_where_the_first_two_part() {
    let mut shadow = Shadow::new(32, 8);
    let prompt = |salt| [tokens(50, 0), tokens(10, salt)].concat();
    for (salt, found) in [(1, 0), (2, 0), (3, 48), (4, 96)] {
        assert!(shadow.begin(&prompt(salt), true));
        assert_eq!(shadow.found, found, "prompt {salt}");
    }
    // the first one again: its last token has to be run, so that the states at its end are of no use
    assert!(shadow.begin(&prompt(1), true));
    assert_eq!(shadow.found, 96 + 48);
    shadow.check();
}

#[test]
fn a_turn_goes_on_after_its_last_token_that_was_run_and_in_its_own_slot() {
    for overrun in [false, true] {
        let mut shadow = Shadow::new(32, 1);
        assert!(shadow.begin(&tokens(20, 0), true));
        for _ in 0..5 {
            decode(&mut shadow);
        }
        shadow.end(0, Boundary::Turn, overrun);
        let answered = shadow.earlier.pop().expect("a turn");
        assert_eq!(answered.len(), 20 + 6 + 2);
        assert!(shadow.begin(&answered, false));
        assert_eq!(shadow.found, 20 + 5 + usize::from(overrun));
        let slots = shadow.cache.slots.as_ref().expect("linear attention");
        assert_eq!((slots.len(), slots.used()), (1, 1), "no slot more");
        // it took them with it
        assert_eq!(shadow.cache.found_tokens(&answered), 0);
    }
}

#[test]
fn kept_states_go_before_a_sequence_waits_for_a_slot() {
    let mut shadow = Shadow::new(32, 3);
    for salt in 1..4 {
        assert!(shadow.begin(&tokens(20, salt), true));
        decode(&mut shadow);
        shadow.end(0, Boundary::Turn, false);
    }
    let hits = |shadow: &Shadow| shadow.earlier.iter().map(|t| shadow.cache.found_tokens(t)).collect::<Vec<_>>();
    assert_eq!(hits(&shadow), [21, 21, 21]);
    // the ends of their prompts are gone; then those go that were kept first
    assert!(shadow.begin(&tokens(17, 4), false));
    assert_eq!(hits(&shadow), [0, 21, 21]);
    assert!(shadow.begin(&tokens(17, 5), false));
    assert_eq!(hits(&shadow), [0, 0, 21]);
    assert_eq!(shadow.cache.states_held(), 3 * shadow.cache.state_bytes);
}

#[test]
fn a_block_that_is_kept_with_later_tokens_is_copied_before_others_are_written_or_they_are_forgotten() {
    let first = tokens(36, 0);
    let after = |more: [u32; 2]| [&first[..], &more].concat();
    for (blocks, left) in [(4, 37), (3, 36)] {
        let mut shadow = Shadow::new(blocks, 8);
        assert!(shadow.begin(&first, true));
        shadow.end(0, Boundary::Ended, true);
        // the last block is kept with its four tokens of the prompt, and with the one after them
        assert_eq!(shadow.cache.found_tokens(&after([7, 9])), 37);
        assert!(shadow.begin(&after([9, 9]), false));
        assert_eq!((shadow.found, shadow.cache.groups[0].copies.len()), (36, 0));
        assert_eq!(shadow.cache.found_tokens(&after([7, 9])), left, "{blocks}");
        shadow.preempt(0);
        assert!(shadow.begin(&after([7, 9]), false));
        assert_eq!(shadow.found, 36 + left);
        shadow.check();
    }
}

#[test]
fn states_are_given_up_with_the_blocks_before_them() {
    let mut shadow = Shadow::new(4, 8);
    assert!(shadow.begin(&tokens(40, 1), true));
    shadow.end(0, Boundary::Turn, false);
    assert_eq!(shadow.cache.found_tokens(&shadow.earlier[0]), 40);
    // all four blocks are needed
    assert!(shadow.begin(&tokens(60, 2), false));
    assert_eq!(shadow.cache.found_tokens(&shadow.earlier[0]), 0);
    let mut slots = shadow.cache.slots.take().expect("linear attention");
    let free = std::iter::from_fn(|| slots.allocate()).count();
    assert_eq!(free, 7, "nothing is kept");
}
