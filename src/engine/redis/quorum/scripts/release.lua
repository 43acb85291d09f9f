-- Lets go of what the owner holds of the names on this node, by whichever attempt, and tells whoever waits.
--
-- KEYS    1 .. n         the lock keys
--         n+1 .. 2n      their fence companions
--         2n+1 .. 3n     their metadata companions
-- ARGV    1  the owner's token
--         2  how long the names stay busy, in ms; 0: they are free at once
-- Answer  1 when the owner held every name, else 0

local n, held = #KEYS / 3, 0
for i = 1, n do
  if let_go(KEYS[i], KEYS[n + i], KEYS[n + n + i], ARGV[1], 'holdfast:free:', ARGV[2]) then
    held = held + 1
  end
end
return held == n and 1 or 0
