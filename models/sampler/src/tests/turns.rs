//! Several turns: what is inserted between them, and that neither the time of an answer nor the room of the cache
//! changes a token.

use super::*;

/// Ends of turns.
const STOPS: std::ops::Range<u32> = 0..8;

/// Answers the first turns of a sequence with three tokens each: at once, when it is asked for, or after one other try.
struct Scripted {
    turns: usize,
    later: bool,
    restarts: Vec<(usize, usize)>,
    waiting: Vec<((usize, usize), Next)>,
}

impl Scripted {
    fn new(turns: usize, later: bool) -> Self {
        Self { turns, later, restarts: Vec::new(), waiting: Vec::new() }
    }

    fn answer(sample: &Sample) -> Vec<u32> {
        let turn = sample.turns() as u32;
        vec![20 + turn, 30 + sample.sample as u32, 40]
    }
}

impl Turns for Scripted {
    fn turn(&mut self, sample: &Sample, room: usize) -> Next {
        let place = (sample.request, sample.sample);
        let next = if let Some(at) = self.restarts.iter().position(|restart| *restart == place) {
            self.restarts.swap_remove(at);
            Next::Restart
        } else if sample.finish == FinishReason::Length || sample.turns() > self.turns {
            Next::End
        } else if room <= 3 {
            Next::Cut
        } else {
            Next::Append(Self::answer(sample))
        };
        if self.later {
            self.waiting.push((place, next));
            return Next::Wait;
        }
        next
    }

    fn awaited(&mut self) -> Vec<((usize, usize), Next)> {
        // in the order of no sequence
        self.waiting.reverse();
        std::mem::take(&mut self.waiting)
    }
}

fn sampling() -> SamplingParams {
    SamplingParams { max_new_tokens: 60, stop_ids: STOPS.collect(), ..SamplingParams::default() }
}

fn limits(kv_cache_bytes: Option<usize>) -> SchedulerConfig {
    SchedulerConfig { keep_completions: true, kv_cache_bytes, ..SchedulerConfig::new(6) }
}

fn play(decoder: &Decoder, limits: &SchedulerConfig, turns: &mut Scripted) -> Generated {
    let sampling = sampling();
    let generator = Generator::new(decoder, None, &sampling).expect("valid settings");
    let prompts = requests(&[20, 7, 13, 33, 5]);
    let mut ended = 0;
    let generated = generator.run_turns(&prompts, 2, limits, turns, |_| ended += 1);
    assert_eq!(ended, 10, "each completion ends once");
    generated.expect("samples")
}

/// Checks every token: a draw where it was sampled, the script's where not.
fn check_turns(decoder: &Decoder, sampled: &Sample) {
    let sampling = sampling();
    let near = nearness(decoder);
    let request = &requests(&[20, 7, 13, 33, 5])[sampled.request];
    let tokens = [request.tokens.as_slice(), &sampled.tokens].concat();
    let rows = scores(decoder, &tokens, 1.0);
    let key = DrawKey { sample: request.key.sample + sampled.sample as u32, ..request.key };
    let mut before = 0;
    for range in &sampled.inserted {
        let last = sampled.tokens[range.start - 1];
        assert!(STOPS.contains(&last), "a turn ends before an answer");
        assert!(range.start > before && range.len() == 3);
        assert_eq!(sampled.tokens[range.end - 1], 40);
        before = range.end;
    }
    assert!(before < sampled.tokens.len(), "a completion ends with a turn");
    for (i, &token) in sampled.tokens.iter().enumerate() {
        if sampled.inserted.iter().any(|range| range.contains(&i)) {
            assert_eq!((sampled.logps[i], sampled.full_logps[i]), (0.0, 0.0));
            continue;
        }
        let row = &rows[request.tokens.len() + i - 1];
        let u = f64::from(key.uniform(i as u32));
        let draws = [0.0, -near, near].map(|shift| sample_truncated(row, &sampling, (u + shift) as f32));
        assert!(draws.iter().any(|draw| draw.token == token), "token {i}");
        if draws[0].token == token {
            let apart = f64::from((draws[0].logp - sampled.logps[i]).abs());
            assert!(apart < near, "log-prob of token {i}: {apart}");
        }
    }
}

fn tokens(generated: &Generated) -> Vec<(Vec<u32>, Vec<std::ops::Range<usize>>)> {
    generated.samples.iter().map(|s| (s.tokens.clone(), s.inserted.clone())).collect()
}

#[test]
fn every_token_of_every_turn_is_its_draw_after_all_tokens_before_it() {
    for family in ["llama", "gemma2", "qwen3_5_text"] {
        let decoder = decoder(family);
        let generated = play(&decoder, &limits(None), &mut Scripted::new(3, false));
        for sample in &generated.samples {
            check_turns(&decoder, sample);
        }
        let turns: Vec<usize> = generated.samples.iter().map(Sample::turns).collect();
        assert!(turns.contains(&4), "{turns:?}");
        assert_eq!(generated.stats.recomputed_tokens, 0);
    }
}

#[test]
fn answers_that_come_late_and_turns_that_begin_again_change_no_token() {
    let decoder = decoder("llama");
    let at_once = play(&decoder, &limits(None), &mut Scripted::new(3, false));
    for later in [false, true] {
        let mut again = Scripted::new(3, later);
        again.restarts = vec![(0, 1), (3, 0), (4, 1)];
        let replayed = play(&decoder, &limits(None), &mut again);
        assert_eq!(tokens(&replayed), tokens(&at_once), "later: {later}");
        assert!(again.restarts.is_empty());
    }
}

#[test]
fn a_small_cache_changes_no_token_of_any_turn() {
    for family in ["llama", "qwen3_5_text"] {
        let decoder = decoder(family);
        let roomy = play(&decoder, &limits(None), &mut Scripted::new(3, true));
        let least = SchedulerConfig::new(1).least_cache_bytes(decoder.arch(), 33 + 60);
        let crowded = limits(Some(2 * least));
        let preempted = play(&decoder, &crowded, &mut Scripted::new(3, true));
        for sample in &preempted.samples {
            check_turns(&decoder, sample);
        }
        assert_eq!(tokens(&preempted), tokens(&roomy), "{family}");
        assert!(preempted.stats.cache_bytes < roomy.stats.cache_bytes);
    }
}

#[test]
fn a_turn_is_prefilled_from_the_last_full_block_of_the_one_before() {
    let decoder = decoder("llama");
    let kept = play(&decoder, &limits(None), &mut Scripted::new(3, false));
    let forgetful = SchedulerConfig { keep_completions: false, ..limits(None) };
    let lost = play(&decoder, &forgetful, &mut Scripted::new(3, false));
    assert_eq!(tokens(&kept), tokens(&lost));
    let (kept, lost) = (kept.stats, lost.stats);
    assert!(kept.prefix_cache_hits > lost.prefix_cache_hits, "{kept:?}");
    let run = kept.prefill_tokens + kept.prefix_cache_hits;
    assert_eq!(run, lost.prefill_tokens + lost.prefix_cache_hits);
}

#[test]
fn an_answer_without_room_for_a_turn_is_refused() {
    struct TooLong;
    impl Turns for TooLong {
        fn turn(&mut self, _: &Sample, room: usize) -> Next {
            Next::Append(vec![1; room])
        }
    }
    struct Silent;
    impl Turns for Silent {
        fn turn(&mut self, _: &Sample, _: usize) -> Next {
            Next::Wait
        }
    }
    let decoder = decoder("llama");
    let sampling = sampling();
    let generator = Generator::new(&decoder, None, &sampling).expect("valid settings");
    let prompts = requests(&[5]);
    let outcome = generator.run_turns(&prompts, 1, &limits(None), &mut TooLong, |_| {});
    let message = outcome.expect_err("no room").to_string();
    assert!(message.contains("leaves room for one after it"), "{message}");
    let outcome = generator.run_turns(&prompts, 1, &limits(None), &mut Silent, |_| {});
    let message = outcome.expect_err("no answer").to_string();
    assert!(message.contains("there is none"), "{message}");
}
