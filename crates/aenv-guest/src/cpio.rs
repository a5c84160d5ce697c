//! The cpio archive (`newc`) that the kernel unpacks: `Documentation/driver-api/early-userspace/buffer-format.rst`.

/// An archive in the making.
pub(crate) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

const FILE: u32 = 0o100_000;
const FOLDER: u32 = 0o040_000;
const CHARACTER: u32 = 0o020_000;

impl Archive {
    pub(crate) fn new() -> Self {
        Self { bytes: Vec::new(), entries: 0 }
    }

    pub(crate) fn folder(&mut self, name: &str) {
        self.entry(name, FOLDER | 0o755, (0, 0), &[]);
    }

    pub(crate) fn file(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entry(name, FILE | mode, (0, 0), content);
    }

    pub(crate) fn character_device(&mut self, name: &str, mode: u32, device: (u32, u32)) {
        self.entry(name, CHARACTER | mode, device, &[]);
    }

    /// Ends the archive and pads it.
    ///
    /// QEMU 10 keeps its ACPI tables in the last page of memory, and the loader of ELF kernels puts the initramfs at the
    /// top: a tail of more than about 3 KiB in the last page overwrites them, and no virtio device appears.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entries = 0;
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        if self.bytes.len() % PAGE > TAIL {
            let padded = self.bytes.len().next_multiple_of(PAGE);
            self.bytes.resize(padded, 0);
        }
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.entries += 1;
        let (inode, size, name_size) = (self.entries, content.len(), name.len() + 1);
        let links = if mode & FOLDER == FOLDER { 2 } else { 1 };
        // Magic; inode, mode, uid, gid, links, mtime, size, device of the file, device that it is, name size, check.
        let header = format!(
            "070701{inode:08x}{mode:08x}{:08x}{:08x}{links:08x}{:08x}{size:08x}{:08x}{:08x}{:08x}{:08x}{name_size:08x}{:08x}",
            0, 0, 0, 0, 0, device.0, device.1, 0
        );
        self.bytes.extend_from_slice(header.as_bytes());
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend_from_slice(content);
        self.align();
    }

    fn align(&mut self) {
        let aligned = self.bytes.len().next_multiple_of(4);
        self.bytes.resize(aligned, 0);
    }
}

const PAGE: usize = 4096;
const TAIL: usize = 2048;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archives_never_end_in_the_upper_half_of_a_page() {
        for size in 0..3000 {
            let mut archive = Archive::new();
            archive.file("f", 0o644, &vec![1; size]);
            let bytes = archive.finish();
            assert!(bytes.len() % PAGE <= TAIL, "{size}");
            assert_eq!(bytes.len() % 4, 0);
        }
    }

    #[test]
    fn headers_have_the_form_of_newc() {
        let mut archive = Archive::new();
        archive.folder("dev");
        archive.character_device("dev/console", 0o600, (5, 1));
        archive.file("a", 0o755, b"hello");
        let bytes = archive.finish();
        let text = String::from_utf8_lossy(&bytes);
        assert_eq!(text.matches("070701").count(), 4);
        assert_eq!(&text[..22], "07070100000001000041ed");
        assert!(text.contains("00000005000000010000000c00000000dev/console\0"));
        assert!(text.contains("TRAILER!!!\0"));
    }
}
