//! A run that hangs: what it waits for, and what its threads do.

use super::threads::{self, ThreadState};
use super::{Pause, Place};
use crate::checkpoint::RunDir;
use firebrick_backends::collective::HUNG;
use firebrick_backends::heartbeat::{Pulse, waits};
use firebrick_data::process;
use std::fmt::{self, Display, Formatter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A phase without progress for too long.
#[derive(Clone, Debug)]
pub struct Hang {
    place: Place,
    length: Duration,
    rank: Option<usize>,
    /// What the training thread waits for, or else does.
    training: Option<String>,
    /// What workers wait for.
    workers: Vec<String>,
    /// Waits, processes and threads.
    details: String,
    /// True if the folder holds the run already.
    is_resumable: bool,
    /// File of the run folder with the details, if the folder exists and could be written to.
    file: Option<PathBuf>,
}

impl Hang {
    pub(super) fn new(pause: &Pause, pulse: &Pulse, rank: usize, size: usize) -> Self {
        let (waits, threads) = (waits(), threads::all());
        let of_training = threads.iter().find(|thread| Some(thread.id) == pulse.thread());
        let registered = waits.iter().rev().find(|waiting| pulse.follows(waiting)).map(|waiting| waiting.what.clone());
        let training = registered.or_else(|| of_training.map(ThreadState::activity));
        let workers = waits.iter().filter(|waiting| waiting.is_of_worker()).map(|waiting| waiting.what.clone());
        let mut details = format!("limit: {:.1} s\n\nwaits:\n", pause.limit.as_secs_f64());
        for waiting in &waits {
            let whose = if waiting.is_of_worker() {
                "worker"
            } else if pulse.follows(waiting) {
                "training thread"
            } else {
                "training thread of another rank"
            };
            let id = waiting.thread.map_or_else(String::new, |id| format!(" {id}"));
            let seconds = waiting.since.elapsed().as_secs_f64();
            let _ = writeln!(details, "  {whose}{id}: {} ({seconds:.1} s)", waiting.what);
        }
        details += "\nprocesses of rewards and environments:\n";
        for (id, name) in process::running() {
            let _ = writeln!(details, "  {id}: {name}, {}", threads::state_of_process(id));
        }
        details += "\nthreads:\n";
        for thread in &threads {
            let _ = writeln!(details, "  {thread}");
        }
        Self {
            place: pause.place,
            length: pause.length,
            rank: (size > 1).then_some(rank),
            training,
            workers: workers.collect(),
            details,
            is_resumable: false,
            file: None,
        }
    }

    /// Name of the phase: that of [`Phase`](crate::metrics::Phase), `load` before the first step, or `report` between
    /// phases.
    pub fn phase(&self) -> &'static str {
        self.place.phase
    }

    /// Waits, processes and threads, as in the file.
    pub fn details(&self) -> &str {
        &self.details
    }

    /// Kills the processes of rewards and environments, which may hang too.
    pub fn kill_processes(&self) {
        process::kill_all();
    }

    /// Message to other ranks.
    pub(super) fn last_words(&self) -> String {
        format!("{HUNG} {}", self.summary())
    }

    /// Looks at the run folder, and writes the file into it.
    pub(super) fn written(self, folder: &Path) -> Self {
        let name = self.rank.map_or_else(|| "hang.txt".to_owned(), |rank| format!("hang_rank_{rank}.txt"));
        let file = folder.join(name);
        let text = format!("{}\n{}", self.summary(), self.details);
        let is_written = folder.is_dir() && std::fs::write(&file, text).is_ok();
        Self { is_resumable: RunDir::holds_run(folder), file: is_written.then_some(file), ..self }
    }

    fn summary(&self) -> String {
        let Place { step, phase } = self.place;
        let mut text =
            format!("in the phase `{phase}` of step {step}: no progress for {:.1} s", self.length.as_secs_f64());
        if let Some(training) = &self.training {
            let _ = write!(text, "; it waits for {training}");
        }
        if !self.workers.is_empty() {
            let _ = write!(text, "; its workers wait for {}", self.workers.join(", "));
        }
        text
    }
}

impl Display for Hang {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.rank {
            Some(rank) => write!(f, "rank {rank} hung ")?,
            None => f.write_str("the run hung ")?,
        }
        f.write_str(&self.summary())?;
        match &self.file {
            Some(file) => write!(f, ". {} lists what all threads did", file.display())?,
            None => write!(f, ".\n{}", self.details.trim_end())?,
        }
        let way_on = if self.is_resumable { "continue from the last checkpoint with --resume" } else { "start again" };
        write!(f, "\nRemove the cause and {way_on}; trainer.heartbeat_timeout is the limit")
    }
}
