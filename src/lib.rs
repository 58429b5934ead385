//! firebrick
