use super::*;
use firebrick_models::random::Stream;
use proptest::prelude::*;

const LAYOUTS: [Layout; 2] = [Layout::Packed, Layout::Padded];
const ALL: [Layout; 3] = [Layout::Packed, Layout::Padded, Layout::SharedPrefix];

fn sequences(lengths: &[usize]) -> Vec<Sequence> {
    lengths.iter().map(|&n| Sequence { tokens: vec![1; n], ..Sequence::default() }).collect()
}

fn cut(layout: Layout, max_tokens: usize, max_sequences: Option<usize>) -> MicroBatchLimits {
    MicroBatchLimits {
        max_tokens,
        max_sequences,
        layout,
        // hidden size 256, 6 layers: attention costs as much as everything else at 1,500 tokens
        key_cost: 1.0 / 1500.0,
        key: "memory.train_tokens",
    }
}

fn wasting(waste: f64) -> Grouping {
    Grouping { waste, queries: 0 }
}

/// Prompt and completion of grade-school word problems: log-normal, 250 tokens in the middle, a tenth above 400.
fn word_problems(count: usize, seed: u64) -> Vec<usize> {
    let mut random = Stream::new(seed, 0);
    let length = |_| (5.5 + 0.38 * f64::from(random.normal())).exp().round();
    let lengths = (0..count).map(length);
    lengths.map(|n| n.clamp(60.0, 1024.0) as usize).collect()
}

#[test]
fn a_sequence_above_the_budget_is_refused_with_the_smallest_budget_that_would_do() {
    for layout in ALL {
        let message = Batch::pack(&sequences(&[3, 9, 4]), cut(layout, 8, None)).unwrap_err().to_string();
        assert!(message.contains("9 tokens") && message.contains("memory.train_tokens is 8"), "{message}");
        assert!(message.ends_with("raise it to at least 9"), "{message}");
    }
}

#[test]
fn packed_micro_batches_cost_within_a_tenth_of_the_least_that_the_largest_can() {
    for seed in 0..20 {
        for budget in [2048, 4096, 8192, 16_384] {
            let sequences = sequences(&word_problems(256, seed));
            let cut = cut(Layout::Packed, budget, None);
            let batch = Batch::pack(&sequences, cut).unwrap();
            let cost = |micro: &Vec<usize>| -> u64 { micro.iter().map(|&i| cut.cost(sequences[i].tokens.len())).sum() };
            let costs: Vec<u64> = batch.indices().iter().map(cost).collect();
            // no cut into as many micro-batches has a cheaper one at its top than the mean, or than the longest
            // sequence
            let mean = costs.iter().sum::<u64>() as f64 / costs.len() as f64;
            let longest = sequences.iter().map(|s| cut.cost(s.tokens.len())).max();
            let bound = mean.max(longest.unwrap() as f64);
            let most = *costs.iter().max().unwrap() as f64;
            assert!(most <= 1.1 * bound, "{most} over {bound}, budget {budget}");

            let tokens: usize = sequences.iter().map(|s| s.tokens.len()).sum();
            // what best-fit needs above the fewest there can be, and one for the balance
            let fewest = tokens.div_ceil(budget);
            let most = fewest + fewest / 16 + 1;
            assert!(costs.len() <= most, "{} of {fewest}", costs.len());
        }
    }
}

#[test]
fn packed_rows_have_no_padding_and_attention_little() {
    let sequences = sequences(&word_problems(256, 1));
    for budget in [2048, 8192] {
        let packed = Batch::pack(&sequences, cut(Layout::Packed, budget, None)).unwrap();
        for (waste, most) in [(0.0, 0.0), (0.1, 0.1)] {
            let stats = packed.stats(wasting(waste));
            assert!(stats.padding().abs() < f64::EPSILON);
            assert!(stats.attention_padding() <= most);
        }
        let stats = Batch::pack(&sequences, cut(Layout::Padded, budget, None)).unwrap().stats(wasting(0.0));
        assert!(stats.padding() > 0.01 && stats.rows > packed.stats(wasting(0.0)).rows);
        assert!((stats.padding() - stats.attention_padding()).abs() < f64::EPSILON);
    }
}

#[test]
fn the_largest_micro_batch_comes_first_and_equal_lengths_stand_together() {
    let sequences = sequences(&[5, 9, 5, 7, 9, 5, 3]);
    for layout in LAYOUTS {
        let batch = Batch::pack(&sequences, cut(layout, 18, None)).unwrap();
        let lengths: Vec<Vec<usize>> =
            batch.micros().iter().map(|micro| micro.iter().map(|s| s.tokens.len()).collect()).collect();
        let rows: Vec<usize> = batch.indices().iter().map(|micro| batch.rows(micro)).collect();
        assert!(rows.is_sorted_by(|a, b| a >= b), "{rows:?}");
        for micro_lengths in lengths {
            assert!(micro_lengths.is_sorted_by(|a, b| a >= b), "{micro_lengths:?}");
        }
    }
}

#[test]
fn a_fixed_size_gives_as_few_micro_batches_as_it_can() {
    for layout in LAYOUTS {
        let sequences = sequences(&word_problems(30, 3));
        let batch = Batch::pack(&sequences, cut(layout, usize::MAX, Some(4))).unwrap();
        assert_eq!(batch.indices().len(), 8, "{layout:?}");
        assert!(batch.indices().iter().all(|micro| micro.len() <= 4));
    }
}

#[test]
fn an_empty_batch_has_no_micro_batches() {
    for layout in ALL {
        let batch = Batch::pack(&[], cut(layout, 8, None)).unwrap();
        assert!(batch.indices().is_empty());
        assert_eq!(batch.stats(wasting(0.1)).rows, 0);
    }
}

#[test]
fn numbers_of_several_batches_add_up() {
    let sequences = sequences(&[4, 2]);
    let one = |layout| Batch::pack(&sequences, cut(layout, 8, None)).unwrap().stats(wasting(0.0));
    let mut sum = one(Layout::Padded);
    sum.absorb(one(Layout::Packed));
    assert_eq!((sum.micro_batches, sum.tokens, sum.rows), (2, 12, 14));
    assert_eq!((sum.largest, sum.budget), (8, 8));
    assert!((sum.padding() - 1.0 / 7.0).abs() < 1e-12);
}

/// Groups of completions: the tokens of a prompt, and those of each completion.
fn groups(sizes: &[(usize, &[usize])]) -> Vec<Sequence> {
    let group = |(prompt, &(length, completions)): (usize, &(usize, &[usize]))| -> Vec<Sequence> {
        let prompt = vec![prompt as u32; length];
        let own = (1000..).zip(completions).map(|(first, &n)| Sequence::completion(&prompt, &vec![first; n]));
        own.collect()
    };
    sizes.iter().enumerate().flat_map(group).collect()
}

#[test]
fn a_prompt_counts_once_in_a_micro_batch_and_again_where_a_group_is_above_the_budget() {
    let sequences = groups(&[(101, &[10, 20, 30, 40]), (51, &[10, 10])]);
    let batch = Batch::pack(&sequences, cut(Layout::SharedPrefix, 1000, None)).unwrap();
    let stats = batch.stats(wasting(0.0));
    // each completion has the last token of its prompt
    let unique = 100 + (11 + 21 + 31 + 41) + 50 + 2 * 11;
    assert_eq!((stats.tokens, stats.unique_tokens, stats.rows), (504 + 122, unique, unique));
    assert_eq!(batch.indices(), [[0, 1, 2, 3, 4, 5]]);
    assert!(stats.padding().abs() < 1e-12);

    let batch = Batch::pack(&sequences, cut(Layout::SharedPrefix, 175, None)).unwrap();
    let stats = batch.stats(wasting(0.0));
    assert_eq!((stats.micro_batches, stats.unique_tokens), (3, unique + 100));
    assert!(stats.largest <= 175);
    let mut group: Vec<usize> = batch.indices().iter().filter(|m| m[0] < 4).flatten().copied().collect();
    group.sort_unstable();
    assert_eq!(group, [0, 1, 2, 3]);
}

#[test]
fn ranks_get_whole_groups_while_there_are_as_many() {
    let sequences = groups(&[(100, &[10; 4]), (99, &[10; 4]), (98, &[10; 4]), (97, &[10; 4])]);
    let batch = Batch::pack_for(&sequences, cut(Layout::SharedPrefix, 4096, None), 4).unwrap();
    assert_eq!(batch.stats(wasting(0.0)).unique_tokens, 99 + 98 + 97 + 96 + 16 * 11);
    let batch = Batch::pack_for(&sequences, cut(Layout::SharedPrefix, 4096, None), 8).unwrap();
    assert_eq!(
        (batch.indices().len(), batch.stats(wasting(0.0)).unique_tokens),
        (8, 2 * (99 + 98 + 97 + 96) + 16 * 11)
    );
}

/// Groups of completions of 100 tokens; each group's prompt has the system prompt before its tokens.
fn with_system(system: usize, prompts: &[usize], completions: usize) -> Vec<Sequence> {
    let group = |(index, &tokens): (usize, &usize)| -> Vec<Sequence> {
        let prompt = [vec![7; system], vec![100 + index as u32; tokens]].concat();
        let completion = |first: usize| Sequence::completion(&prompt, &vec![1000 + first as u32; 100]);
        (0..completions).map(completion).collect()
    };
    prompts.iter().enumerate().flat_map(group).collect()
}

#[test]
fn a_system_prompt_counts_once_before_the_prompts_behind_it() {
    let sequences = with_system(200, &[51; 4], 8);
    let rows = |budget, ranks| {
        let batch = Batch::pack_for(&sequences, cut(Layout::SharedPrefix, budget, None), ranks).unwrap();
        (batch.indices().len(), batch.stats(wasting(0.0)).unique_tokens)
    };
    let group = 50 + 8 * 101;
    assert_eq!(rows(10_000, 1), (1, 200 + 4 * group));
    // groups stay together where they have to be apart, and repeat what is before them
    assert_eq!(rows(200 + 2 * group, 1), (2, 2 * 200 + 4 * group));
    assert_eq!(rows(200 + group, 1), (4, 4 * (200 + group)));
}

#[test]
fn ranks_share_the_branches_of_a_tree_and_repeat_a_short_root() {
    let sequences = with_system(120, &[51; 8], 8);
    for ranks in [2, 4, 8] {
        let batch = Batch::pack_for(&sequences, cut(Layout::SharedPrefix, 100_000, None), ranks).unwrap();
        let stats = batch.stats(wasting(0.0));
        assert_eq!(stats.unique_tokens, ranks * 120 + 8 * (50 + 8 * 101), "{ranks} ranks");
        assert!(stats.imbalance < 1.01, "{ranks} ranks: {}", stats.imbalance);
    }
    // groups of several sizes: a rank has what is about its part
    let sequences = with_system(120, &[30, 900, 60, 120, 400, 250, 80, 700], 4);
    let batch = Batch::pack_for(&sequences, cut(Layout::SharedPrefix, 100_000, None), 3).unwrap();
    let stats = batch.stats(wasting(0.0));
    assert_eq!(stats.micro_batches, 3);
    assert!(stats.imbalance < 1.1, "{}", stats.imbalance);
}

proptest! {
    #[test]
    fn no_micro_batch_exceeds_the_budget_and_none_is_lost(
        // heavy-tailed: powers of a uniform number
        roots in prop::collection::vec(0.03_f64..1.0, 0..80),
        extra in 0_usize..3000,
        most in prop::option::of(1_usize..8),
    ) {
        let lengths: Vec<usize> = roots.iter().map(|u| (3.0 / u.powi(2)) as usize).collect();
        let sequences = sequences(&lengths);
        let budget = lengths.iter().max().unwrap_or(&0) + extra;
        for layout in ALL {
            let batch = Batch::pack(&sequences, cut(layout, budget, most)).unwrap();
            for micro in batch.indices() {
                prop_assert!(batch.rows(micro) <= budget);
                prop_assert!(most.is_none_or(|n| micro.len() <= n));
                prop_assert!(!micro.is_empty());
            }
            let mut indices: Vec<usize> = batch.indices().concat();
            indices.sort_unstable();
            prop_assert_eq!(indices, (0..lengths.len()).collect::<Vec<_>>());
            let stats = batch.stats(wasting(0.1));
            prop_assert!(stats.largest <= budget && stats.attention_padding() <= 1.0);
            prop_assert_eq!(stats.tokens, lengths.iter().sum::<usize>());
        }
    }
}
