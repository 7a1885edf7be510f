//! One test per rule that random operations do not single out, by subject; and random operations, beside a model of them.

#![cfg(all(target_os = "linux", not(miri)))]

mod access;
mod advice;
mod ageing;
mod areas;
mod away;
mod callbacks;
mod clears;
mod copies;
mod costs;
mod crowds;
mod discards;
mod exhaustion;
mod extremes;
mod filling;
mod folding;
mod given;
mod holes;
mod leaving;
mod lines;
mod locks;
mod moves;
mod oracle;
mod pools;
mod races;
mod read_only;
mod reads;
mod refused;
mod relaxing;
mod reschedule;
mod rights;
mod scale;
mod sources;
mod sparse;
mod stage2;
mod strangers;
mod support;
mod tenants;
mod unhooked;
mod unhooked_flushes;
mod unhooked_forks;
mod working_set;
mod zeroes;
