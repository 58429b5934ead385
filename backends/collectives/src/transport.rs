//! Transport of messages between ranks: bytes from one to another, in order. All collectives are made of that.

use super::Result;
use super::mailbox::{Mailbox, Message};
use std::fmt::Debug;

/// The ranks of a world, and messages between them. Those of one channel and sender arrive in the order in which they
/// were sent.
pub(super) trait Transport: Debug + Send + Sync {
    /// This rank.
    fn rank(&self) -> usize;

    /// Ranks of the world.
    fn size(&self) -> usize;

    /// True if all ranks are threads of this process.
    fn shares_process(&self) -> bool {
        false
    }

    /// Sends a message, at most a frame long, and does not wait until it has arrived.
    fn post(&self, to: usize, channel: u64, message: Message) -> Result<()>;

    /// Mailbox of this rank.
    fn mailbox(&self) -> &Mailbox;

    /// Tells all ranks, this one included, that this one gives up, because of the rank `lost` (it may be this one), which
    /// has these last words. So a rank that hears it from another one names the rank that began it.
    fn abort(&self, lost: usize, message: &str);

    /// The lowest number that no channel of this rank has, and the way to raise it.
    fn channels(&self) -> &std::sync::atomic::AtomicU64;
}
