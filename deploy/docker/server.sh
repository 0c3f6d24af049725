#!/bin/sh
# The server with the settings of deploy/redis/valkey.conf, open to its container's network. The
# password comes from a file and goes in by stdin: no command line and no environment shows it.
# usage: server.sh SETTINGS PASSWORD_FILE MEMORY      (MEMORY such as 2gb)
set -eu
password=$(cat "$2")
case $password in
    "" | *[!A-Za-z0-9+/=_.-]*)
        echo "server: $2 has to hold one line of letters, digits and +/=_.- alone" >&2
        exit 2
        ;;
esac
exec valkey-server "$1" - <<END
bind * -::*
aclfile ""
requirepass $password
maxmemory $3
END
