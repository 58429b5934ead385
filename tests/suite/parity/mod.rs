//! Against transformers, TRL and torch, number by number: everything that stands in the fixtures.

mod adapters;
mod heads;
mod models;
mod optim;
mod schedules;
mod tokenizers;
mod train;
