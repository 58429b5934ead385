//! A panic on one of several ranks: in a task, on the thread that judges completions.

use super::config;
use firebrick_backends::collective::{Settings, Threads};
use firebrick_engine::task::{Completion, Example, Reward, Split, Task, TaskError};
use firebrick_engine::trainer::Trainer;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Prompts of one digit, whose completions are judged until one is one too many.
struct Panics {
    left: AtomicUsize,
}

impl Task for Panics {
    fn name(&self) -> &'static str {
        "panics"
    }

    fn len(&self, _: Split) -> Option<u64> {
        Some(10)
    }

    fn example(&self, _: Split, index: u64) -> Result<Example, TaskError> {
        Ok(Example::text(format!("{}+", index % 10), ""))
    }

    fn alphabet(&self) -> Option<&str> {
        Some("0123456789+=")
    }

    fn reward(&self, _: &Example, completion: &Completion<'_>) -> Result<Reward, TaskError> {
        let left = self.left.fetch_sub(1, Ordering::SeqCst);
        assert!(left > 1, "a task has come to its end");
        Ok(Reward::single("length", completion.tokens.len() as f64))
    }
}

#[test]
fn a_panic_in_a_task_of_one_rank_ends_the_run_of_all_and_names_the_rank() {
    let folders = tempfile::tempdir().unwrap();
    // while the first prompts are validated, and in a step
    for judged in [2, 15] {
        let begun = Instant::now();
        let folder = folders.path().join(judged.to_string());
        let ended = Threads::run(3, Settings::default(), |rank| {
            let left = if rank.rank() == 1 { judged } else { usize::MAX };
            let built = Trainer::builder(config(&folder, &[]))
                .task(Panics { left: AtomicUsize::new(left) })
                .world(rank)
                .build();
            let ran = built.and_then(|mut trainer| trainer.run().map(drop));
            ran.expect_err("an end").to_string()
        });
        for (rank, ended) in ended.into_iter().enumerate() {
            let said = match ended {
                Ok(said) | Err(said) => said,
            };
            assert!(said.contains("a task has come to its end"), "{rank}: {said}");
            assert!(rank == 1 || said.contains("rank 1"), "{rank}: {said}");
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "{judged}");
    }
}
