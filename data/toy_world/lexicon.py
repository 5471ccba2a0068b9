"""The words of the toy world: lists of English words, and names made of syllables.

Every name and every key word belongs to exactly one of three splits, by a checksum of its text. A
model trained on the `train` world has never seen a person, a place or a key of the `test` world,
though it knows all their syllables.
"""

import zlib

SPLITS = ("train", "calibration", "test")
SPLIT_OF_BUCKET = ("train",) * 7 + ("calibration",) + ("test",) * 2  # shares of all names

ADJECTIVES = tuple(
    """
    able acid agile airy alert amber ample ancient angry arctic ashen atomic avid awake balmy
    basic bitter bland blind blunt bold bony bouncy brainy brave brief bright brisk broad bronze
    bumpy busy calm candid careful casual cautious cheap cheery chilly civil classy clean clever
    cloudy clumsy coarse cold common cosmic costly cozy crafty crisp crooked cruel curly curious
    damp dapper daring dark dear deep dense dizzy double dreamy dry dull dusty eager early
    earnest easy elastic empty equal exact exotic faint fair famous fancy fast fertile fierce
    final firm flaky flat fluffy foggy foreign formal fragile frank frosty frozen frugal funny
    fuzzy gentle giant gifted glad glossy golden good grand grassy gray great greasy grim gross
    grumpy guilty handy happy hardy harsh hasty hazy heavy hollow honest humble humid hungry icy
    ideal idle jolly juicy keen kind large late lazy lean light likely little lively local lofty
    lonely long loose loud lovely loyal lucky lunar mad major marine mature meek mellow merry
    messy mighty mild minor misty modern modest moist moody mossy muddy murky mute narrow nasty
    native neat nervous nimble noble noisy normal novel numb odd oily open orange ornate oval
    pale plain polite poor proud pure quaint quick quiet rapid rare ready regal rich rigid ripe
    rough round royal rural rusty salty sandy scarce secret sharp shiny short shy silent silky
    silver simple sleepy slim slow small smooth snowy sober soft solar solid sour spicy stale
    steep stiff stout strong stuffy sturdy subtle sunny super sweet swift tall tame tart tasty
    tender thick thin tidy tiny tired tough tricky true ugly unique upper urban useful usual
    vague vain vast velvet violet vital vivid warm wary weak wealthy weary weird whole wicked
    wide wild windy wise witty wooden worldly worthy young zany zesty
    """.split()
)
NOUNS = tuple(
    """
    acorn actor album alley anchor angle ankle apple apron arch arena armor arrow artist atlas
    attic aunt author axis badge bagel baker balloon banana banjo barn barrel basin basket beach
    beacon bean beetle bell belt bench berry bishop blanket blossom board boat bonus border
    bottle boulder bowl branch bread brick bridge broom bucket bugle butter button cabin cactus
    camel camera candle canoe canyon captain carbon cargo carpet carrot castle cattle cellar
    chain chair chalk chapel cherry chief chimney cider circle circus clerk cliff clock cloud
    clover coast cobra coffee collar comet copper coral corner cotton couch cousin cradle crane
    crater cricket crow crown crystal cup curtain cushion dancer desk diary dinner doctor
    dolphin donkey door dragon drawer drum eagle earth easel echo elbow engine falcon farmer
    fern ferry fiddle field finger flag flame flute forest fork fountain fox frame friend frog
    garage garden garlic gate ghost giraffe glacier glove goat goose grape guitar hammer harbor
    harp hat hawk hedge helmet hermit hill honey hook horse hotel hunter island ivory jacket jar
    jewel judge jungle kayak kettle kitchen kite kitten knight ladder lake lamp lantern lawyer
    leaf lemon letter lever lily lion lizard lobster locket lumber magnet mango maple marble
    market mask meadow melon merchant meteor mirror mitten monk monkey moon moose motor mountain
    mouse museum music napkin needle nest north notebook oak oasis ocean olive onion orchid
    otter oven owl oyster paddle painter palace panda paper parcel parrot parsley path peach
    peanut pearl pebble pencil pepper piano picnic pigeon pillow pilot pine planet plate plum
    pocket poem pony poplar potato pottery prince pump puppet puzzle quarry queen quilt rabbit
    radio raft rain ranch raven ribbon rice river robin rocket roof rope rose ruby sailor salmon
    salt sandal saucer scarf school scooter sheep shelf shirt shoulder shovel singer sister
    sleeve slipper smoke snail soldier sparrow spider spoon spruce squash squirrel stable star
    statue stone storm stove student sugar summer sunset swan table tailor teacher temple
    thistle thread throne thunder ticket tiger timber toast tomato torch tower trail train
    trumpet tulip tunnel turkey turtle uncle valley vase village violin walnut walrus whale
    wheat wheel willow window winter wizard wolf yogurt zebra
    """.split()
)
JOBS = tuple(
    """
    baker barber butcher carpenter clerk cook dentist doctor driver farmer fisher gardener guard
    hunter judge lawyer mason miller miner nurse painter pilot plumber poet porter potter sailor
    singer smith tailor teacher trader waiter weaver writer
    """.split()
)
ANIMALS = tuple(
    """
    bear camel cat cow crow dog donkey duck eel fox frog goat goose hen horse lamb mole mouse
    mule owl pig pony rabbit raven sheep snake swan toad turtle wolf
    """.split()
)
COLORS = tuple(
    """
    amber black blue brown gold gray green indigo ivory orange pink purple red silver teal white
    yellow
    """.split()
)
DISHES = tuple(
    (
        "bean soup, black bread, carrot stew, cheese cake, corn pie, fish pie, fried rice, "
        "garlic toast, honey cake, leek soup, lemon tart, mushroom stew, nut bread, onion soup, "
        "pea soup, plum tart, potato salad, roast duck, salt fish, sour plums"
    ).split(", ")
)
INSTRUMENTS = tuple(
    """
    banjo bugle cello drum fiddle flute guitar harp horn lute lyre organ piano pipe trumpet
    viola violin whistle
    """.split()
)
FRUITS = tuple(
    """
    apples beans berries coins cups eggs figs grapes hats jars keys lemons maps nuts pears pens
    plums shells stamps stones
    """.split()
)

_ONSETS = "b br d dr f fl g gr h j k kl l m n p pl r s sk st t tr v w z".split()
_VOWELS = "a e i o u ai or an el in ar".split()
SYLLABLES = tuple(onset + vowel for onset in _ONSETS for vowel in _VOWELS)[::3]  # about a hundred
PLACE_ENDINGS = tuple("by dale ford ham ley mere mouth port stead ton vale wick".split())

# One line a topic: its name, what one finds there, what people do there, what is said of it.
_TOPIC_LINES = """
harbor: nets ropes sails boats barrels anchors crates
  carried mended counted painted lifted
  the tide was late; the wind came from the north; the gulls were loud
school: books maps pens lessons letters songs tables
  copied learned read explained forgot
  the bell rang twice; nobody had slept well; the lesson was long
market: apples coins baskets scales spices candles cloth
  sold weighed bought traded priced
  prices rose again; the square was full; rain kept people away
farm: fields fences horses carts sacks plows hens
  fed cleaned counted fixed sold
  the harvest was good; the soil was dry; winter came early
workshop: hammers planks nails wheels tools hinges chairs
  repaired built cut polished measured
  the glue had not dried; good wood is rare; the fire was still warm
library: books shelves letters records maps stories notes
  sorted found read copied lent
  silence was the rule; dust lay everywhere; the index was wrong
kitchen: pots plates knives loaves spoons stews jars
  cooked washed tasted shared burned
  the soup needed salt; guests were coming; the oven was slow
mountain: paths stones huts ropes goats springs bridges
  climbed crossed marked repaired watched
  snow fell in the night; the view was wide; the path was steep
court: laws letters seals witnesses papers claims fines
  judged signed heard refused wrote
  the case was old; no one agreed; the judge was patient
garden: roses seeds hedges ponds trees beds paths
  planted watered cut drew admired
  the roses were late; bees filled the air; the shade was cool
theater: masks songs stages coats lamps plays seats
  sang painted moved lit applauded
  the hall was sold out; an actor was ill; the story was sad
railway: trains tickets tracks signals trunks bridges clocks
  checked delayed loaded stamped cleaned
  the train was late; steam filled the hall; the timetable had changed
hospital: beds bottles bandages lists windows blankets visits
  washed counted ordered opened changed
  the night was quiet; the doctor was tired; visitors waited outside
mine: lamps carts stones ladders tunnels beams picks
  carried lit dug pushed tested
  the air was bad; the shaft was deep; water had come in
mill: sacks wheels stones gears belts doors loaves
  turned filled oiled loaded mended
  the river was low; flour covered all; the wheel stood still
observatory: stars lenses charts clocks notes domes lamps
  measured drew cleaned noted compared
  the sky was clear; a comet was near; the lens was cracked
"""


Words = tuple[str, ...]


def _read_topics(text: str) -> dict[str, tuple[Words, Words, Words]]:
    lines = text.strip().split("\n")
    topics = {}
    for first, deeds, sayings in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        name, things = first.split(": ")
        said = tuple(sayings.strip().split("; "))
        topics[name] = (tuple(things.split()), tuple(deeds.split()), said)
    return topics


TOPICS = _read_topics(_TOPIC_LINES)


def split_of(text: str) -> str:
    """The one split that a name or key word belongs to."""
    return SPLIT_OF_BUCKET[zlib.crc32(text.encode()) % len(SPLIT_OF_BUCKET)]
