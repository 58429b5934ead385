//! The table of metrics: names, descriptions, and which row describes a name.

use super::super::phase::Phase;
use super::*;
use std::collections::BTreeSet;

fn all() -> impl Iterator<Item = &'static Described> {
    METRICS.iter().flat_map(|(_, rows)| rows.iter())
}

fn pattern(name: &str) -> Option<&'static str> {
    described(name).map(|row| row.name)
}

#[test]
fn names_are_unique_and_well_formed() {
    let mut names = BTreeSet::new();
    for row in all() {
        assert!(names.insert(row.name), "{} is described twice", row.name);
        assert_eq!(row.name.matches('{').count(), row.name.matches('}').count(), "{}", row.name);
        assert!(!row.name.contains([' ', '|']), "{}", row.name);
    }
    let headings: BTreeSet<&str> = METRICS.iter().map(|(heading, _)| *heading).collect();
    assert_eq!(headings.len(), METRICS.len());
}

#[test]
fn descriptions_are_short_sentences() {
    for row in all() {
        let first = row.meaning.chars().next();
        assert!(first.is_some_and(|c| c.is_uppercase() || c == '`'), "{}: {}", row.name, row.meaning);
        assert!(row.meaning.ends_with('.') && !row.meaning.contains("  "), "{}: {}", row.name, row.meaning);
        assert!(!row.meaning.contains('|'), "{}: a table's cell", row.name);
        let article = ["The ", "A ", "An "].iter().find(|article| row.meaning.starts_with(**article));
        assert_eq!(article, None, "{}: {}", row.name, row.meaning);
    }
    let words: usize = all().map(|row| row.meaning.split_whitespace().count()).sum();
    assert!(words <= 1_420, "{words} words");
}

#[test]
fn a_name_has_the_description_of_the_most_specific_pattern() {
    assert_eq!(pattern("actor/pg_loss"), Some("actor/pg_loss"));
    assert_eq!(pattern("reward/math/mean"), Some("reward/{name}/mean"));
    assert_eq!(pattern("reward/math/tries/mean"), Some("reward/{name}/{key}/mean"));
    assert_eq!(pattern("reward/math/running_std"), Some("reward/{name}/{running_mean,running_std}"));
    assert_eq!(pattern("response_length/min"), Some("response_length/{mean,max,min}"));
    assert_eq!(pattern("response_length/clip_ratio"), Some("response_length/clip_ratio"));
    assert_eq!(pattern("val-core/data/gsm8k/reward"), Some("val-core/{set}/reward"));
    assert_eq!(pattern("val-core/a/b/acc/mean@4"), Some("val-{core,aux}/{set}/{acc,reward}/mean@{n}"));
    assert_eq!(pattern("val-aux/ä/acc/pass@1"), Some("val-{core,aux}/{set}/acc/pass@{k}"));
    assert_eq!(pattern("val-aux/s/reward/worst@2/mean"), Some("val-aux/{set}/{acc,reward}/worst@{k}/mean"));
    for unknown in ["", "actor", "actor/pg_loss/mean", "response_length/median", "val-core//reward"] {
        assert_eq!(pattern(unknown), None, "{unknown}");
    }
}

#[test]
fn every_phase_of_a_step_or_validation_is_described() {
    // checkpoints are not timed, and the warm-up leaves no metrics
    let timed = Phase::ALL.iter().filter(|phase| !matches!(phase, Phase::SaveCheckpoint | Phase::WarmUp));
    for phase in timed {
        assert!(described(&format!("timing_s/{phase}")).is_some(), "{phase}");
    }
}
