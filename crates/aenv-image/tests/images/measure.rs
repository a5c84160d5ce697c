//! How fast a layer is applied, beside `tar -x` of the same layer onto the same host disk.
//!
//! `AENV_MEASURE_LAYOUT=DIR cargo test --release -p aenv-image --test images -- --ignored --nocapture measure`, where DIR
//! is an OCI layout with one uncompressed layer, such as `scripts/base-image.sh` makes.

use std::{fs, process::Command, time::Instant};

use crate::support::{Node, run};

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement, and it needs an image of some size"]
async fn conversion_beside_tar() {
    let layout = std::env::var("AENV_MEASURE_LAYOUT").expect("AENV_MEASURE_LAYOUT names an OCI layout");
    let blobs = fs::read_dir(format!("{layout}/blobs/sha256")).unwrap().map(|item| item.unwrap().path());
    let layer = blobs.max_by_key(|path| fs::metadata(path).unwrap().len()).unwrap();
    let bytes = fs::metadata(&layer).unwrap().len();
    fs::read(&layer).unwrap();
    for round in 0..3 {
        let node = Node::start();
        let plain = node.scratch("plain");
        let start = Instant::now();
        run(Command::new("tar").arg("-C").arg(&plain).arg("-xf").arg(&layer));
        run(Command::new("sync").arg("-f").arg(&plain));
        let tar = start.elapsed();
        let start = Instant::now();
        let (image, _) = node.pull(&format!("oci:{layout}")).await.unwrap();
        let pull = start.elapsed();
        println!(
            "round {round}: {bytes} bytes of tar; tar -x and sync {tar:.2?}, pull {pull:.2?} ({:.0}%), layer of {} bytes",
            100.0 * tar.as_secs_f64() / pull.as_secs_f64(),
            image.layers[0].size
        );
    }
}
