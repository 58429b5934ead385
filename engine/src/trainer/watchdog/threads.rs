//! State of this process' threads, as Linux tells it; other systems tell nothing.

use std::fmt::{self, Display, Formatter};

/// State of a thread.
#[derive(Clone, Debug)]
pub(super) struct ThreadState {
    pub id: u32,
    name: String,
    /// Letter of `/proc`.
    state: char,
    /// Function of the kernel in which it waits.
    channel: Option<String>,
    /// System call, with its file.
    call: Option<String>,
}

impl ThreadState {
    /// The system call in which it waits, or its state.
    pub fn activity(&self) -> String {
        let call = self.call.as_ref().map(|call| format!("the system call {call}"));
        call.unwrap_or_else(|| format!("nothing that is known: its thread is {}", state_name(self.state)))
    }
}

impl Display for ThreadState {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.id, self.name, state_name(self.state))?;
        if let Some(call) = &self.call {
            write!(f, ", {call}")?;
        }
        if let Some(channel) = &self.channel {
            write!(f, ", in {channel}")?;
        }
        Ok(())
    }
}

fn state_name(state: char) -> &'static str {
    match state {
        'R' => "running",
        'S' => "sleeping",
        'D' => "waiting for a disk or file system",
        'T' => "stopped by a signal",
        't' => "stopped by a tracer",
        'Z' | 'X' => "ended",
        _ => "in an unknown state",
    }
}

/// State of a process.
pub(super) fn state_of_process(id: u32) -> &'static str {
    state_name(state_in(&format!("/proc/{id}/stat")).unwrap_or('?'))
}

/// The state in a file `stat`, behind the name, which may contain anything.
fn state_in(path: &str) -> Option<char> {
    let stat = std::fs::read_to_string(path).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

/// All threads of this process, by ascending id.
pub(super) fn all() -> Vec<ThreadState> {
    let entries = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let ids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut threads: Vec<ThreadState> = ids.filter_map(thread).collect();
    threads.sort_by_key(|thread| thread.id);
    threads
}

/// A thread, unless it has ended.
fn thread(id: u32) -> Option<ThreadState> {
    let read = |name: &str| std::fs::read_to_string(format!("/proc/self/task/{id}/{name}")).ok();
    Some(ThreadState {
        id,
        name: read("comm")?.trim().to_owned(),
        state: state_in(&format!("/proc/self/task/{id}/stat"))?,
        channel: read("wchan").filter(|channel| !["", "0"].contains(&channel.as_str())),
        call: read("syscall").and_then(|line| call(&line)),
    })
}

/// The system call of a line of `/proc/…/syscall`: its number and its arguments.
#[cfg(target_os = "linux")]
fn call(line: &str) -> Option<String> {
    let mut words = line.split_whitespace();
    let number: libc::c_long = words.next()?.parse().ok()?;
    let mut argument = || u64::from_str_radix(words.next()?.trim_start_matches("0x"), 16).ok();
    let first = argument()?;
    let file = || {
        std::fs::read_link(format!("/proc/self/fd/{first}")).map_or("a file".into(), |path| path.display().to_string())
    };
    Some(match number {
        libc::SYS_read | libc::SYS_pread64 | libc::SYS_readv => format!("read of {}", file()),
        libc::SYS_write | libc::SYS_pwrite64 | libc::SYS_writev => format!("write to {}", file()),
        libc::SYS_fsync | libc::SYS_fdatasync => format!("fsync of {}", file()),
        libc::SYS_flock | libc::SYS_fcntl => format!("lock of {}", file()),
        libc::SYS_recvfrom | libc::SYS_recvmsg => format!("receive from {}", file()),
        libc::SYS_sendto | libc::SYS_sendmsg => format!("send to {}", file()),
        libc::SYS_connect => format!("connect of {}", file()),
        libc::SYS_openat => format!("open of {}", text_at(argument()?)),
        libc::SYS_newfstatat | libc::SYS_statx => format!("stat of {}", text_at(argument()?)),
        libc::SYS_renameat | libc::SYS_renameat2 | libc::SYS_mkdirat | libc::SYS_unlinkat => {
            format!("rename, creation or removal of {}", text_at(argument()?))
        }
        libc::SYS_futex => "futex (another thread, or a lock)".to_owned(),
        libc::SYS_ppoll | libc::SYS_epoll_pwait | libc::SYS_pselect6 => "poll of files or sockets".to_owned(),
        libc::SYS_wait4 | libc::SYS_waitid => "wait for a process".to_owned(),
        libc::SYS_nanosleep | libc::SYS_clock_nanosleep => "sleep".to_owned(),
        other => format!("number {other}"),
    })
}

#[cfg(not(target_os = "linux"))]
fn call(_line: &str) -> Option<String> {
    None
}

/// Text of this process that ends with a zero, such as the path of a blocked `open`.
#[cfg(target_os = "linux")]
fn text_at(address: u64) -> String {
    use std::os::unix::fs::FileExt;
    // to the end of its page: the next one may not exist
    let mut bytes = vec![0; 4096 - (address % 4096) as usize];
    let read = std::fs::File::open("/proc/self/mem").and_then(|memory| memory.read_at(&mut bytes, address));
    let text = bytes[..read.unwrap_or(0)].split(|byte| *byte == 0).next().unwrap_or_default();
    if text.is_empty() { "a file".into() } else { String::from_utf8_lossy(text).into_owned() }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use std::fs::File;
    use std::process::Command;
    use std::time::{Duration, Instant};

    #[test]
    fn a_thread_that_opens_a_pipe_nobody_writes_is_shown_with_the_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.jsonl");
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let (from, name) = (path.clone(), path.display().to_string());
        let opened = std::thread::Builder::new().name("opener".into()).spawn(move || File::open(from).map(drop));
        let until = Instant::now() + Duration::from_secs(20);
        let shown = loop {
            let thread = all().into_iter().find(|thread| thread.name == "opener");
            match thread.map(|thread| (thread.activity(), thread.to_string())) {
                Some((activity, line)) if activity.contains(&name) => break Some((activity, line)),
                _ if Instant::now() > until => break None,
                _ => std::thread::yield_now(),
            }
        };
        drop(File::options().write(true).open(&path).unwrap());
        opened.unwrap().join().unwrap().unwrap();
        let (activity, line) = shown.expect("a blocked thread");
        assert!(activity.contains("open of"), "{activity}");
        assert!(line.contains("opener: ") && line.contains(&name), "{line}");
    }

    #[test]
    fn a_process_is_shown_as_it_is_stopped() {
        let mut child = Command::new("sh").args(["-c", "kill -s STOP $$"]).spawn().unwrap();
        let until = Instant::now() + Duration::from_secs(20);
        while state_of_process(child.id()) != "stopped by a signal" && Instant::now() < until {
            std::thread::yield_now();
        }
        let state = state_of_process(child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(state, "stopped by a signal");
    }
}
