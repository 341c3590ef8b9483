// Hands requests of HTTP/2 in clear, which KCL's MultiLangDaemon speaks, on to a server of HTTP/1.1: proxy URL
//
// It says on which port it listens.
package main

import (
	"fmt"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
)

func main() {
	server, err := url.Parse(os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(listener.Addr().(*net.TCPAddr).Port)
	proxy := httputil.NewSingleHostReverseProxy(server)
	proxy.Transport = &http.Transport{MaxIdleConnsPerHost: 128}
	both := new(http.Protocols)
	both.SetHTTP1(true)
	both.SetUnencryptedHTTP2(true)
	log.Fatal((&http.Server{Handler: proxy, Protocols: both}).Serve(listener))
}
