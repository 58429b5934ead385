//! Data of a run: rows of files and of the Hugging Face Hub, tasks and their rule rewards, environments.

#![forbid(unsafe_code)]

pub mod hub;
pub mod process;
pub mod task;
