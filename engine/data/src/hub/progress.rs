//! Progress of downloads.

use firebrick_spec::heartbeat::beat;
use hf_hub::api::Progress;
use std::sync::OnceLock;

/// Progress of a download.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Download {
    /// The file's name in its repository.
    pub file: String,
    /// Downloaded bytes.
    pub done: u64,
    /// Bytes of the whole file.
    pub total: u64,
    /// True after its end.
    pub finished: bool,
}

type Listener = Box<dyn Fn(&Download) + Send + Sync>;

static LISTENER: OnceLock<Listener> = OnceLock::new();

/// Sets the listener of download progress; the first call of a process counts.
pub fn on_download(listener: impl Fn(&Download) + Send + Sync + 'static) {
    // a second listener is not an error: the first one stays
    let _ = LISTENER.set(Box::new(listener));
}

/// Passes the client's reports on.
pub(super) struct DownloadReporter(Download);

impl DownloadReporter {
    pub(super) fn new(file: &str) -> Self {
        Self(Download { file: file.to_owned(), done: 0, total: 0, finished: false })
    }

    fn notify(&self) {
        if let Some(listener) = LISTENER.get() {
            listener(&self.0);
        }
    }
}

impl Progress for DownloadReporter {
    fn init(&mut self, size: usize, _: &str) {
        // called again after a resumption, with what is there reported next
        self.0.total = size as u64;
        self.0.done = 0;
    }

    fn update(&mut self, size: usize) {
        self.0.done += size as u64;
        beat();
        self.notify();
    }

    fn finish(&mut self) {
        self.0.finished = true;
        self.notify();
    }
}
