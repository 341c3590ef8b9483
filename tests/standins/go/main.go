// Kubernetes's own API server on a loopback port, over an etcd in the same process; the first argument is the port, and
// TOKEN in the environment what clients must bring. Everything is written into the folder that it is started in.
package main

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net/url"
	"os"

	"go.etcd.io/etcd/server/v3/embed"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
)

const (
	accounts = "service-accounts.pem"
	tokens   = "tokens.csv"
)

func main() {
	if err := serve(os.Args[1], os.Getenv("TOKEN")); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func serve(port, token string) error {
	if err := os.WriteFile(tokens, []byte(token+",admin,admin,system:masters\n"), 0o600); err != nil {
		return err
	}
	if err := writeKey(); err != nil {
		return err
	}
	etcd, err := begun()
	if err != nil {
		return err
	}
	defer etcd.Close()
	command := app.NewAPIServerCommand()
	command.SetArgs([]string{
		"--etcd-servers=http://" + etcd.Clients[0].Addr().String(),
		"--secure-port=" + port,
		"--bind-address=127.0.0.1",
		"--cert-dir=certificates",
		"--token-auth-file=" + tokens,
		"--authorization-mode=AlwaysAllow",
		"--service-account-issuer=https://127.0.0.1",
		"--service-account-key-file=" + accounts,
		"--service-account-signing-key-file=" + accounts,
		"--disable-admission-plugins=ServiceAccount", // no controller makes the accounts that it asks for
	})
	return command.Execute()
}

func writeKey() error {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return err
	}
	block := &pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}
	return os.WriteFile(accounts, pem.EncodeToMemory(block), 0o600)
}

func begun() (*embed.Etcd, error) {
	anyPort := url.URL{Scheme: "http", Host: "127.0.0.1:0"}
	config := embed.NewConfig()
	config.Dir = "etcd"
	config.LogLevel = "error"
	config.ListenClientUrls, config.ListenPeerUrls = []url.URL{anyPort}, []url.URL{anyPort}
	etcd, err := embed.StartEtcd(config)
	if err != nil {
		return nil, err
	}
	<-etcd.Server.ReadyNotify()
	return etcd, nil
}
