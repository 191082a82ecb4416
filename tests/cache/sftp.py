"""An SFTP server on loopback over a folder, for one user who gives any password."""

import os
import socket
import threading
from pathlib import Path

import paramiko


class _Login(paramiko.ServerInterface):
    def check_auth_password(self, username, password):
        return paramiko.AUTH_SUCCESSFUL

    def check_channel_request(self, kind, chanid):
        return paramiko.OPEN_SUCCEEDED


class _Handle(paramiko.SFTPHandle):
    def __init__(self, file, flags):
        super().__init__(flags)
        self.readfile = self.writefile = file

    def stat(self):
        return paramiko.SFTPAttributes.from_stat(os.fstat(self.readfile.fileno()))


def _typed(act):
    """An OSError becomes the protocol's error code."""

    def typed(*arguments):
        try:
            done = act(*arguments)
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno)
        return paramiko.SFTP_OK if done is None else done

    return typed


class _Files(paramiko.SFTPServerInterface):
    @_typed
    def list_folder(self, path):
        found = []
        for item in Path(path).iterdir():
            attributes = paramiko.SFTPAttributes.from_stat(item.lstat())
            attributes.filename = item.name
            found.append(attributes)
        return found

    @_typed
    def stat(self, path):
        return paramiko.SFTPAttributes.from_stat(Path(path).stat())

    lstat = stat

    @_typed
    def open(self, path, flags, attr):
        descriptor = os.open(path, flags, 0o644)
        mode = "wb" if flags & os.O_WRONLY else "r+b" if flags & os.O_RDWR else "rb"
        return _Handle(os.fdopen(descriptor, mode), flags)

    @_typed
    def mkdir(self, path, attr):
        Path(path).mkdir()

    @_typed
    def rename(self, old, new):
        if Path(new).exists():  # as the protocol wants it
            raise FileExistsError(17, "exists")
        Path(old).rename(new)

    @_typed
    def posix_rename(self, old, new):
        Path(old).replace(new)

    @_typed
    def remove(self, path):
        Path(path).unlink()


class SftpServer:
    """Serves the whole file system of this machine to loopback until ``close``."""

    def __init__(self):
        self._key = paramiko.RSAKey.generate(2048)
        self._transports = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            transport = paramiko.Transport(client)
            transport.add_server_key(self._key)
            transport.set_subsystem_handler("sftp", paramiko.SFTPServer, _Files)
            transport.start_server(server=_Login())
            self._transports.append(transport)

    def close(self):
        """Stop serving."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for transport in self._transports:
            transport.close()
        self._thread.join()
