//! Against transformers, TRL and torch, number by number: everything that stands in the fixtures.

mod adapters;
mod heads;
mod models;
mod optim;
mod rewards;
mod schedules;
mod sft;
mod tokenizers;
mod train;
