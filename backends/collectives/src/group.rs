//! A group of ranks, and where it stands.

use super::header::Header;
use super::mailbox::Watched;
use super::transport::Transport;
use super::{CollectiveError, Settings, Traffic};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// The channel of a world's first group.
const WORLD: u64 = 0;

/// A group of ranks of a transport.
#[derive(Debug)]
pub(super) struct Staged {
    pub(super) transport: Arc<dyn Transport>,
    pub(super) settings: Settings,
    /// Tells this group's messages from those of others.
    pub(super) channel: u64,
    /// The group that this one was split from, where it was. Any of its ranks may fail: whoever this group waits for
    /// may have been told of it already.
    pub(super) parent: Option<Watched>,
    /// Ranks of the world, by rank of the group.
    pub(super) ranks: Vec<usize>,
    /// This rank in the group.
    pub(super) rank: usize,
    pub(super) state: Mutex<State>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub sequence: u64,
    /// The error after which nothing works.
    pub broken: Option<CollectiveError>,
    /// True if a wait ended because a rank had failed elsewhere.
    pub overtaken: bool,
    /// Headers of operations that this rank is not in yet.
    pub early: HashMap<usize, Header>,
    pub traffic: Traffic,
}

impl Drop for Staged {
    fn drop(&mut self) {
        if self.parent.is_some() {
            self.transport.mailbox().forget(self.channel);
        }
    }
}

impl Staged {
    /// All ranks of a world.
    pub fn world(transport: Arc<dyn Transport>, settings: Settings) -> Self {
        Self {
            rank: transport.rank(),
            ranks: (0..transport.size()).collect(),
            transport,
            settings,
            channel: WORLD,
            parent: None,
            state: Mutex::default(),
        }
    }
}
