//! The memory of a real other process, captured and read back through a stack. The process is this test program again,
//! as the test `victim`, told what to do through its standard input.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its fixtures too")]

mod capture;
mod marks;
mod victim;
