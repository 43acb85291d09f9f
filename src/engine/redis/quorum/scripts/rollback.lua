-- Takes back one attempt's vote, and nothing else: a later attempt of the same owner is left alone.
--
-- KEYS    1 .. n         the lock keys
--         n+1 .. 2n      their metadata companions
-- ARGV    1  what the lock keys hold: the owner's token and the attempt
-- Answer  how many names were given back
--
-- Nobody is told: the name was nobody's, and who was refused because of this vote tries again by itself.

local n = #KEYS / 2

local freed = 0
for i = 1, n do
  if redis.call('GET', KEYS[i]) == ARGV[1] then
    redis.call('DEL', KEYS[i], KEYS[n + i])
    freed = freed + 1
  end
end
return freed
