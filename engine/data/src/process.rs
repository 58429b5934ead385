//! A process that lines are exchanged with, under a deadline that is kept on this side: whatever it does, or does not,
//! it can be ended. It leads a process group of its own, so that what it has started ends with it.

use serde::Deserialize;
use serde_json::Value;
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Longest line that is read, in bytes.
const LONGEST_LINE: u64 = 64 << 20;
/// Lines that wait to be looked at; a process that writes more waits.
const LINES: usize = 256;
/// Bytes that are kept of the end of what a process writes to stderr.
const KEPT: usize = 8 << 10;
/// Time between two looks at whether the work is still wanted.
const POLL: Duration = Duration::from_millis(50);
/// Time for an ended process to be seen as ended, and for the last of its stderr to arrive.
const AFTERMATH: Duration = Duration::from_millis(500);
/// Time for a Python file and all that it imports to load.
const LOADING: Duration = Duration::from_mins(2);
/// Time for a process to end by itself once its input has ended.
const GRACE: Duration = Duration::from_secs(2);

/// Why no line came.
#[derive(Debug)]
pub enum Silence {
    /// The deadline has passed.
    TimedOut,
    /// The process has closed its output, which it does by ending.
    Ended,
    /// What came is no line of text; says what it is.
    Unreadable(String),
    /// The work is not wanted any more.
    Unwanted,
}

/// What programs in Python that talk to this one have in common; what answers requests comes behind it, and a call of
/// `serve`.
const PYTHON: &str = include_str!("process/serve.py");

/// The first line of a Python program: what it has loaded, or why that cannot be used.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum Opening<T> {
    /// Why it cannot be used.
    Refused {
        /// For the user.
        refused: String,
    },
    /// What it is.
    Ready(T),
}

/// A running process.
#[derive(Debug)]
pub struct Process {
    child: Child,
    /// To the thread that writes, so that a process that does not read holds nobody up; none once input has ended.
    requests: Option<Sender<String>>,
    lines: Receiver<Result<String, String>>,
    errors: Arc<Mutex<VecDeque<u8>>>,
    /// Closed when stderr is.
    errors_end: Receiver<()>,
    reaped: bool,
}

impl Process {
    /// Starts a process. `name` is what it is to the run, for what it prints.
    ///
    /// # Errors
    /// The system's, if the program cannot be started.
    pub fn start(command: &mut Command, name: &str) -> std::io::Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(command, 0);
        let mut child = command.spawn()?;
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(stdin), Some(stdout), Some(stderr)) = pipes else { unreachable!("all three are piped") };
        let (requests, written) = channel::<String>();
        thread::spawn(move || write(stdin, &written));
        let (line, lines) = sync_channel(LINES);
        thread::spawn(move || read(stdout, &line));
        let errors = Arc::new(Mutex::new(VecDeque::new()));
        let (end, errors_end) = channel();
        let (kept, name) = (Arc::clone(&errors), name.to_owned());
        thread::spawn(move || {
            keep(stderr, &kept, &name);
            drop(end);
        });
        Ok(Self { child, requests: Some(requests), lines, errors, errors_end, reaped: false })
    }

    /// Starts a Python program: the code that serves requests, then `script`, which is told by `opening` what to load of
    /// a user's file. Gives the line that it answers within a call's `timeout` in seconds, but at least two minutes.
    ///
    /// # Errors
    /// That the file is missing, the interpreter cannot be started, with the setting that names it, or no line came.
    pub fn python(
        interpreter: &str,
        script: &str,
        name: &str,
        (file, opening): (&Path, &Value),
        timeout: f64,
        wanted: &dyn Fn() -> bool,
    ) -> Result<(Self, String), String> {
        if !file.is_file() {
            return Err(format!("there is no file {}", file.display()));
        }
        let mut command = Command::new(interpreter);
        command.args(["-u", "-X", "faulthandler", "-c", &format!("{PYTHON}{script}")]);
        let process = Self::start(&mut command, name)
            .map_err(|e| format!("cannot run `{interpreter}`: {e}; set `python` to a Python interpreter"))?;
        process.send(format!("{opening}\n"));
        let time = LOADING.max(Duration::from_secs_f64(timeout));
        match process.line(Instant::now() + time, wanted) {
            Ok(line) => Ok((process, line)),
            Err(silence) => Err(failure(process, &silence, time)),
        }
    }

    /// Sends lines, and forgets what the process wrote to stderr before.
    pub fn send(&self, lines: String) {
        self.errors().clear();
        if let Some(requests) = &self.requests {
            // a thread that is gone has found the pipe closed, which reading will show
            let _ = requests.send(lines);
        }
    }

    /// The next line, which has to come until `deadline` and while `wanted`.
    ///
    /// # Errors
    /// Why no line came.
    pub fn line(&self, deadline: Instant, wanted: &dyn Fn() -> bool) -> Result<String, Silence> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left.min(POLL)) {
                Ok(line) => return line.map_err(Silence::Unreadable),
                Err(RecvTimeoutError::Disconnected) => return Err(Silence::Ended),
                Err(RecvTimeoutError::Timeout) if !wanted() => return Err(Silence::Unwanted),
                Err(RecvTimeoutError::Timeout) if left.is_zero() => return Err(Silence::TimedOut),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Ends the process, which has gone silent, and all that it has started. Gives how it ended by itself, if it did,
    /// and the end of what it wrote to stderr.
    #[must_use]
    pub fn kill(mut self, silence: &Silence) -> (Option<ExitStatus>, String) {
        // one that has closed its output is about to end; how, is worth waiting for
        let time = match silence {
            Silence::Ended => AFTERMATH,
            _ => Duration::ZERO,
        };
        let status = self.ended_within(time);
        self.end();
        // what a process of another group still holds open is not waited for
        let _ = self.errors_end.recv_timeout(AFTERMATH);
        let text = Vec::from(std::mem::take(&mut *self.errors()));
        (status, String::from_utf8_lossy(&text).trim().to_owned())
    }

    /// What the process has written to stderr since the last request.
    #[must_use]
    pub fn stderr(&self) -> String {
        let text: Vec<u8> = self.errors().iter().copied().collect();
        String::from_utf8_lossy(&text).trim().to_owned()
    }

    fn errors(&self) -> std::sync::MutexGuard<'_, VecDeque<u8>> {
        self.errors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How the process ended, if it does within a time.
    fn ended_within(&mut self, time: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + time;
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                self.reaped = true;
                return Some(status);
            }
            if Instant::now() >= deadline {
                return None;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Kills the process group. A second time it does nothing.
    fn end(&mut self) {
        kill_group(self.child.id());
        if !self.reaped {
            // fails where it has ended
            let _ = self.child.kill();
            let _ = self.child.wait();
            self.reaped = true;
        }
    }
}

impl Drop for Process {
    /// Ends its input, upon which it should end; kills what is left then.
    fn drop(&mut self) {
        if self.reaped {
            return;
        }
        self.requests = None;
        self.ended_within(GRACE);
        self.end();
    }
}

/// What went wrong with a process, which is ended.
#[must_use]
pub fn failure(process: Process, silence: &Silence, time: Duration) -> String {
    let (status, stderr) = process.kill(silence);
    let reason = match (silence, status) {
        (Silence::TimedOut, _) => format!("no answer within {} s", time.as_secs_f64()),
        (Silence::Ended, Some(status)) => format!("its process ended ({status})"),
        (Silence::Ended, None) => "its process closed its output".to_owned(),
        (Silence::Unreadable(what), _) => what.clone(),
        (Silence::Unwanted, _) => "it was called off".to_owned(),
    };
    with_stderr(reason, &stderr)
}

/// A reason with what was written to stderr.
#[must_use]
pub fn with_stderr(reason: String, stderr: &str) -> String {
    match stderr {
        "" => reason,
        stderr => format!("{reason}; its stderr ends with:\n{stderr}"),
    }
}

/// Kills a process group, by the shell: the standard library has no call for it.
fn kill_group(leader: u32) {
    if cfg!(unix) {
        let mut shell = Command::new("sh");
        shell.args(["-c", "kill -s KILL -- \"-$0\"", &leader.to_string()]);
        shell.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // fails where nothing of the group is left
        let _ = shell.status();
    }
}

/// Writes requests until there are no more, or nobody reads.
fn write(mut stdin: impl Write, requests: &Receiver<String>) {
    for lines in requests {
        if stdin.write_all(lines.as_bytes()).and_then(|()| stdin.flush()).is_err() {
            return;
        }
    }
}

/// Hands lines on until there are no more, or nobody wants them.
fn read(stdout: impl Read, lines: &SyncSender<Result<String, String>>) {
    let mut stdout = BufReader::new(stdout);
    loop {
        let mut line = Vec::new();
        let line = match (&mut stdout).take(LONGEST_LINE).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) if line.ends_with(b"\n") => {
                String::from_utf8(line).map_err(|_| "a line that is not UTF-8".to_owned())
            }
            Ok(n) if n as u64 == LONGEST_LINE => Err(format!("a line of more than {LONGEST_LINE} bytes")),
            // the end of the output, in the middle of a line
            Ok(_) => return,
        };
        if lines.send(line).is_err() {
            return;
        }
    }
}

/// Keeps the end of what comes, and shows all of it to who listens.
fn keep(stderr: impl Read, kept: &Mutex<VecDeque<u8>>, name: &str) {
    let mut stderr = BufReader::new(stderr);
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut stderr).take(KEPT as u64).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        tracing::debug!("{name}: {}", String::from_utf8_lossy(&line).trim_end());
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.extend(&line);
        let excess = kept.len().saturating_sub(KEPT);
        kept.drain(..excess);
    }
}
