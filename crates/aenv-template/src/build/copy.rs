//! The `COPY` step: an uploaded tar is unpacked in the guest and merged into its destination, as `docker build` does.

use std::path::Path;

use super::{
    guest::{Guest, GuestError},
    steps::{Context, root},
};

/// `$1` archive, `$2` source, `$3` destination (absolute), `$4` owner, `$5` mode or "".
///
/// The archive's paths are relative to the client's context folder, and `source` is the path or pattern that the client
/// packed. A folder's content is merged into the destination; one file takes the destination's name unless that ends in `/`
/// or is a folder; several go into the destination.
const SCRIPT: &str = r#"
set -eu
archive=$1 source=$2 dest=$3 owner=$4 mode=$5
work=$(mktemp -d /tmp/aenv-copy.XXXXXX)
trap 'rm -rf -- "$work" "$archive"' EXIT
tar -xzf "$archive" -C "$work"
chown -R -h -- "$owner" "$work"
if [ -n "$mode" ]; then chmod -R -- "$mode" "$work"; chmod u+rwx "$work"; fi

make_folder() {
  path=$1 top=
  while [ ! -e "$path" ] && [ "$path" != / ]; do top=$path; path=$(dirname -- "$path"); done
  mkdir -p -- "$1"
  if [ -n "$top" ]; then chown -R -h -- "$owner" "$top"; fi
}

source=${source#./}; source=${source#/}; source=${source%/}
cd "$work"
if [ -z "$source" ] || [ "$source" = . ]; then
  make_folder "$dest"; cp -a -- "$work/." "$dest/"; exit 0
fi
IFS=
set -- $source
if [ ! -e "$1" ] && [ ! -L "$1" ]; then set -- *; fi
if [ $# -eq 1 ] && [ -d "$1" ] && [ ! -L "$1" ]; then
  make_folder "$dest"; cp -a -- "$1/." "$dest/"; exit 0
fi
case "$dest" in */) folder=1 ;; *) folder= ;; esac
if [ $# -gt 1 ] || [ -n "$folder" ] || [ -d "$dest" ]; then
  make_folder "${dest%/}"; cp -a -- "$@" "${dest%/}/"
else
  make_folder "$(dirname -- "$dest")"; cp -a -T -- "$1" "$dest" 2>/dev/null || cp -a -- "$1" "$dest"
fi
"#;

pub(super) async fn run(
    guest: &Guest<'_>,
    context: &Context,
    args: &[String],
    archive: &Path,
) -> Result<(), GuestError> {
    let source = context.expand(&args[0]);
    let given = context.expand(&args[1]);
    let owner = args.get(2).filter(|owner| !owner.is_empty()).unwrap_or(&context.user);
    let mode = args.get(3).map_or("", String::as_str);
    let mut dest = guest.absolute(&given, &context.workdir, &context.user).await?;
    if given.ends_with('/') && !dest.ends_with('/') {
        dest.push('/');
    }
    let inside = format!("/tmp/aenv-copy-{}.tar.gz", uuid::Uuid::new_v4());
    guest.upload(archive, &inside).await?;
    root(guest, SCRIPT, &[&inside, &source, &dest, owner, mode]).await
}
