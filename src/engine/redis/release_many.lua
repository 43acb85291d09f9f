-- Lets go of one name each for several owners, as release.lua does for one owner of several names. No two of the owners are the
-- same.
--
-- KEYS    1 .. n         the lock keys
--         n+1 .. 2n      their queues
--         2n+1 .. 3n     their fence companions, which go with them
-- ARGV    1  where waiters are told, without the process
--         2 .. n+1       the owners' tokens; of one who may have a place in the queue `<token>:<process>[:<ttl>]`, the process
--                        and the ttl as there
-- Answer  n when every owner held its name; else for each name 1 if its owner held it, 0 if not, or -1 if that failed

local to, answers = ARGV[1], {}
for i = 1, n do
  local owner, process, ttl = string.match(ARGV[i + 1], '^(%x+):?(%x*)(.*)')
  local me = process == '' and '' or process .. ':' .. owner .. ttl
  local done, held = pcall(let_go, KEYS[i], KEYS[n + i], KEYS[n + n + i], nil, owner, me, to, '0')
  answers[i] = done and (held and 1 or 0) or -1
end
return answers
