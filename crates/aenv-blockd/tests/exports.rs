//! The export suite: what a VMM may rely on, whichever way a disk is shown to it. Each test runs on FUSE and on ublk. Where the
//! kernel has no ublk_drv, those of the second half do nothing and say so; `make test-lab` runs them in a VM whose kernel has it.
//! Needs root.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its fixtures too")]

#[path = "exports/failures.rs"]
mod failures;
#[path = "exports/io.rs"]
mod io;
#[path = "exports/node.rs"]
mod node;
#[path = "exports/takeover.rs"]
mod takeover;

use aenv_blockd::ExportKind;

/// Whether there is anything to test. In the lab there must be.
fn runs(kind: ExportKind) -> bool {
    let there = kind == ExportKind::Fuse || std::path::Path::new("/dev/ublk-control").exists();
    assert!(there || std::env::var_os("AENV_LAB").is_none(), "the lab's kernel has no ublk_drv");
    if !there {
        eprintln!("SKIPPED: this kernel has no ublk_drv; `make test-lab` runs this test on ublk");
    }
    there
}

/// Each test in both halves.
macro_rules! suite {
    ($($room:ident::$test:ident),* $(,)?) => {
        mod fuse {$(
            #[tokio::test(flavor = "multi_thread")]
            async fn $test() {
                super::$room::$test(aenv_blockd::ExportKind::Fuse).await;
            }
        )*}

        mod ublk_or_skipped_where_the_kernel_has_none {$(
            #[tokio::test(flavor = "multi_thread")]
            async fn $test() {
                if super::runs(aenv_blockd::ExportKind::Ublk) {
                    super::$room::$test(aenv_blockd::ExportKind::Ublk).await;
                }
            }
        )*}
    };
}

suite! {
    io::it_looks_like_the_disk_that_was_asked_for,
    io::random_io_is_what_a_model_says,
    io::a_disk_without_an_upper_cannot_be_written_to,
    io::discards_give_space_back,
    io::what_was_flushed_survives_the_process,
    io::a_seal_under_load_has_all_that_was_written_before_it,
    io::many_disks_come_and_go_side_by_side,
    failures::bytes_that_cannot_be_had_are_an_error_and_not_a_hang,
    failures::what_is_closed_is_gone_for_who_has_it_open,
    failures::a_disk_belongs_to_whom_it_is_given,
    takeover::a_blockd_that_was_killed_shows_its_disks_again,
}

#[tokio::test(flavor = "multi_thread")]
async fn ublk_or_skipped_requests_wait_for_the_next_blockd() {
    if runs(ExportKind::Ublk) {
        takeover::requests_wait_for_the_next_blockd().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ublk_or_skipped_devices_of_nobody_go_and_those_of_others_stay() {
    if runs(ExportKind::Ublk) {
        takeover::devices_of_nobody_go_and_those_of_others_stay().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ublk_or_skipped_partitions_that_a_guest_writes_are_not_looked_at() {
    if runs(ExportKind::Ublk) {
        failures::partitions_that_a_guest_writes_are_not_looked_at().await;
    }
}
