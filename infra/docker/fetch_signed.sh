#!/usr/bin/env bash
# Fetch a file that its publisher has signed, and end unless the signature is of the key with this fingerprint:
#
#   fetch_signed.sh FOLDER-URL FILE KEY-FILE FINGERPRINT
#
# FILE, FILE.sig and KEY-FILE lie in the folder. FILE is left in the working directory; without a good signature
# nothing is.
set -euo pipefail
url=$1 file=$2 key=$3 fingerprint=$4
keys=$(mktemp --directory)
trap 'rm -rf "$keys"' EXIT

for name in "$file" "$file.sig" "$key"; do
    curl --fail --silent --show-error --location --proto '=https' --output "$keys/$name" "$url/$name"
done
gpg=(gpg --homedir "$keys" --batch --quiet --no-tty)
"${gpg[@]}" --import "$keys/$key"
# The line's last word is the primary key's fingerprint, also where a subkey has signed (GnuPG's doc/DETAILS)
told=$("${gpg[@]}" --status-fd 1 --verify "$keys/$file.sig" "$keys/$file" 2>/dev/null) || true
if ! grep --quiet "^\[GNUPG:\] VALIDSIG .* $fingerprint\$" <<<"$told"; then
    echo "$url/$file has no signature of the key $fingerprint." >&2
    exit 1
fi
mv "$keys/$file" "$file"
