-- Releases many names, each of one owner, as release.lua does for one owner of several names.
--
-- KEYS    1 .. n         the lock keys
--         n+1 .. 2n      their queues
--         2n+1 .. 3n     their fence companions
--         3n+1 .. 4n     their metadata companions, only when one of the claims has metadata
-- ARGV    1  where waiters are notified, without the process; where fence companions outlast the release, a space and the
--            time in ms
--         2 .. n+1       the owners' tokens; for an owner with a possible position in the queue `<token>:<process>` and
--                        the rest of the queue's member
-- Answer  n when every owner held its name; else for each name 1 if its owner held it, 0 if not, and 2 more when another call
--         has to hand it off; or -1 if its release failed

local answers = {}
for i = 1, n do
  local owner, process, ttl = string.match(ARGV[i + 1], '^(%x+):?(%x*)(.*)')
  local me = process == '' and '' or process .. ':' .. owner .. ttl
  local fence, metadata = KEYS[n + n + i], KEYS[n + n + n + i]
  local done, held, more = pcall(release_one, KEYS[i], KEYS[n + i], fence, metadata, owner, me, to, last)
  answers[i] = done and (held and 1 or 0) + (more and 2 or 0) or -1
end
return answers
