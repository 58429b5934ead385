//! Who wants to see the memory that operations take.

use super::super::Look;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// Callback that reads memory when an operation has its buffers.
#[derive(Clone, Default)]
pub(super) struct Watched(Arc<Mutex<Option<Look>>>);

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watched")
    }
}

impl Watched {
    pub fn set(&self, look: Look) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(look);
    }

    pub fn look(&self) {
        let look = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let look = look.clone();
        if let Some(look) = look {
            look();
        }
    }
}
