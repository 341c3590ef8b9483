// Loaded before a service that would listen on every interface: it then listens on this machine's loopback only.
const net = require("node:net");

const listen = net.Server.prototype.listen;
net.Server.prototype.listen = function (where, ...rest) {
  const told = typeof where === "object" ? where : { port: where };
  const whenListening = rest.filter((argument) => typeof argument === "function");
  return listen.call(this, { ...told, host: "127.0.0.1" }, ...whenListening);
};
