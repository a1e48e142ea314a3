// An OIDC issuer on loopback: oidc-provider (certified by the OpenID Foundation), for `bench.servers.Issuer`.
//
//   node issuer.mjs MAIN_MODULE_OF_OIDC_PROVIDER CONFIG.json
//
// CONFIG: {"port", "jwks": {"keys": [private keys]}, "clients": {ID: {"secret", "claims": {…}}}}. Each client gets JWT
// access tokens by client_credentials for any resource that it names, with its claims in them. On SIGHUP the file is read
// again: an issuer that changed its keys.
import { createServer } from 'node:http';
import { readFileSync } from 'node:fs';
import { pathToFileURL } from 'node:url';

const [main, file] = process.argv.slice(2);
const { default: Provider } = await import(pathToFileURL(main).href);

function load() {
  const config = JSON.parse(readFileSync(file, 'utf8'));
  const provider = new Provider(`http://127.0.0.1:${config.port}`, {
    jwks: config.jwks,
    clients: Object.entries(config.clients).map(([id, { secret }]) => ({
      client_id: id,
      client_secret: secret,
      grant_types: ['client_credentials'],
      redirect_uris: [],
      response_types: [],
    })),
    extraTokenClaims: (ctx, token) => config.clients[token.clientId].claims,
    features: {
      devInteractions: { enabled: false },
      clientCredentials: { enabled: true },
      resourceIndicators: {
        enabled: true,
        getResourceServerInfo: (ctx, resource) => ({
          scope: 'read',
          audience: resource,
          accessTokenTTL: 3600,
          accessTokenFormat: 'jwt',
          jwt: { sign: { alg: 'RS256' } },
        }),
      },
    },
  });
  provider.on('server_error', (ctx, error) => console.error(error));
  return provider.callback();
}

let answer = load();
process.on('SIGHUP', () => { answer = load(); });
const { port } = JSON.parse(readFileSync(file, 'utf8'));
createServer((request, response) => answer(request, response)).listen(port, '127.0.0.1');
