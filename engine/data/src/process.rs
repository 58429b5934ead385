//! A process that exchanges lines under a deadline. It can always be ended: it leads its own process group, so
//! that its children end with it.

use firebrick_spec::heartbeat::wait_for;
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Longest line that is read, in bytes.
const LONGEST_LINE: u64 = 64 << 20;
/// Buffered lines; a process that writes more waits.
const MAX_LINES: usize = 256;
/// Kept bytes of the end of stderr.
const STDERR_BYTES: usize = 8 << 10;
/// Interval of checks whether the work is still wanted.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Time for an ended process to be reaped, and for the rest of its stderr to arrive.
const REAP_TIMEOUT: Duration = Duration::from_millis(500);
/// Time for a Python file and all that it imports to load.
const LOAD_TIMEOUT: Duration = Duration::from_mins(2);
/// Time for a process to end by itself once its input has ended.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// Processes that run.
static RUNNING: Mutex<Running> = Mutex::new(Running { names: BTreeMap::new(), closed: false });

struct Running {
    /// Names by ids.
    names: BTreeMap<u32, String>,
    /// True if the program ends.
    closed: bool,
}

/// Ids and names of the processes that run.
pub fn running() -> Vec<(u32, String)> {
    registered().names.iter().map(|(id, name)| (*id, name.clone())).collect()
}

/// Kills all processes and their children, of a program that ends at once, and those that are still started.
pub fn kill_all() {
    let mut running = registered();
    running.closed = true;
    running.names.keys().for_each(|id| kill_group(*id));
}

fn registered() -> MutexGuard<'static, Running> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reason why no line came.
#[derive(Debug)]
pub enum Silence {
    /// The deadline has passed.
    TimedOut,
    /// The process has closed its output, which it does by ending.
    Ended,
    /// The output is no line of text, as described.
    Unreadable(String),
    /// The work is not wanted any more.
    Unwanted,
}

/// Common part of Python programs that serve requests; the handlers of requests and a call of `serve` follow it.
const PYTHON: &str = include_str!("process/serve.py");

/// The first line of a Python program: the loaded object, or why it cannot be used.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum Opening<T> {
    /// The reason why it cannot be used.
    Refused {
        /// The reason, for the user.
        refused: String,
    },
    /// The loaded object.
    Ready(T),
}

/// A running process.
#[derive(Debug)]
pub struct Process {
    child: Child,
    /// To the writing thread, so that a process that does not read blocks nobody; `None` after the end of input.
    requests: Option<Sender<String>>,
    lines: Receiver<Result<String, String>>,
    errors: Arc<Mutex<VecDeque<u8>>>,
    /// Closed when stderr is.
    errors_end: Receiver<()>,
    /// Name and id, for messages.
    label: String,
    reaped: bool,
}

impl Process {
    /// Starts a process. `name` labels its output in the log.
    ///
    /// # Errors
    /// The system's, if the program cannot be started.
    pub fn start(command: &mut Command, name: &str) -> std::io::Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(command, 0);
        let mut child = command.spawn()?;
        let mut running = registered();
        running.names.insert(child.id(), name.to_owned());
        if running.closed {
            kill_group(child.id());
        }
        drop(running);
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(stdin), Some(stdout), Some(stderr)) = pipes else { unreachable!("all three are piped") };
        let label = format!("{name}, process {}", child.id());
        let (requests, written) = channel::<String>();
        let reader = format!("{label}, to read");
        thread::spawn(move || write(stdin, &written, &reader));
        let (line, lines) = sync_channel(MAX_LINES);
        thread::spawn(move || read(stdout, &line));
        let errors = Arc::new(Mutex::new(VecDeque::new()));
        let (end, errors_end) = channel();
        let (kept, name) = (Arc::clone(&errors), name.to_owned());
        thread::spawn(move || {
            keep_stderr(stderr, &kept, &name);
            drop(end);
        });
        Ok(Self { child, requests: Some(requests), lines, errors, errors_end, label, reaped: false })
    }

    /// Starts a Python program: the code that serves requests, then `script`, which `opening` tells what to load from
    /// a user's file. Returns the answer, which must come within `timeout` seconds, but at least two minutes.
    ///
    /// # Errors
    /// A message if the file is missing, the interpreter cannot be started, or no line came.
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
        let time = LOAD_TIMEOUT.max(Duration::from_secs_f64(timeout));
        match process.line(Instant::now() + time, wanted) {
            Ok(line) => Ok((process, line)),
            Err(silence) => Err(failure(process, &silence, time)),
        }
    }

    /// Sends lines, and forgets what the process wrote to stderr before.
    pub fn send(&self, lines: String) {
        self.errors().clear();
        if let Some(requests) = &self.requests {
            // a missing thread has found the pipe closed, which reading will show
            let _ = requests.send(lines);
        }
    }

    /// The next line, which must come before `deadline` and while `wanted` returns true.
    ///
    /// # Errors
    /// [`Silence`] if no line came.
    pub fn line(&self, deadline: Instant, wanted: &dyn Fn() -> bool) -> Result<String, Silence> {
        let _wait = wait_for(format!("{}, to answer", self.label));
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left.min(POLL_INTERVAL)) {
                Ok(line) => return line.map_err(Silence::Unreadable),
                Err(RecvTimeoutError::Disconnected) => return Err(Silence::Ended),
                Err(RecvTimeoutError::Timeout) if !wanted() => return Err(Silence::Unwanted),
                Err(RecvTimeoutError::Timeout) if left.is_zero() => return Err(Silence::TimedOut),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Kills a silent process and its children. Returns its exit status if it ended by itself,
    /// and the end of its stderr.
    pub fn kill(mut self, silence: &Silence) -> (Option<ExitStatus>, String) {
        // a process that has closed its output is about to end: wait for its status
        let time = match silence {
            Silence::Ended => REAP_TIMEOUT,
            _ => Duration::ZERO,
        };
        let status = self.ended_within(time);
        self.end();
        // do not wait for a pipe that another group's process holds open
        let _ = self.errors_end.recv_timeout(REAP_TIMEOUT);
        let text = Vec::from(std::mem::take(&mut *self.errors()));
        (status, String::from_utf8_lossy(&text).trim().to_owned())
    }

    /// Text of stderr since the last request.
    pub fn stderr(&self) -> String {
        let text: Vec<u8> = self.errors().iter().copied().collect();
        String::from_utf8_lossy(&text).trim().to_owned()
    }

    fn errors(&self) -> MutexGuard<'_, VecDeque<u8>> {
        self.errors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Exit status of the process, if it ends in time.
    fn ended_within(&mut self, time: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + time;
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                self.forget();
                return Some(status);
            }
            if Instant::now() >= deadline {
                return None;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Kills the process group. A second call does nothing.
    fn end(&mut self) {
        kill_group(self.child.id());
        if !self.reaped {
            // fails where it has ended
            let _ = self.child.kill();
            let _ = self.child.wait();
            self.forget();
        }
    }

    /// The process has been reaped: its id may become another's.
    fn forget(&mut self) {
        self.reaped = true;
        registered().names.remove(&self.child.id());
    }
}

impl Drop for Process {
    /// Ends its input, upon which it should end; then kills the rest.
    fn drop(&mut self) {
        if self.reaped {
            return;
        }
        self.requests = None;
        self.ended_within(SHUTDOWN_TIMEOUT);
        self.end();
    }
}

/// Kills a failed process and describes the failure.
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

/// A reason with the text of stderr.
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
fn write(mut stdin: impl Write, requests: &Receiver<String>, reader: &str) {
    for lines in requests {
        let _wait = wait_for(reader);
        if stdin.write_all(lines.as_bytes()).and_then(|()| stdin.flush()).is_err() {
            return;
        }
    }
}

/// Passes lines on until they end, or nobody wants them.
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

/// Keeps the end of stderr, and logs all of it.
fn keep_stderr(stderr: impl Read, kept: &Mutex<VecDeque<u8>>, name: &str) {
    let mut stderr = BufReader::new(stderr);
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut stderr).take(STDERR_BYTES as u64).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        tracing::debug!("{name}: {}", String::from_utf8_lossy(&line).trim_end());
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.extend(&line);
        let excess = kept.len().saturating_sub(STDERR_BYTES);
        kept.drain(..excess);
    }
}
